"""A tiny experiment and an executor without processes, for the tests of the runner."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ablations.executors import EXECUTORS, Executor, Job, OnSteps, Outcome
from ablations.models.config import MoEConfig
from ablations.presets import Ablation, Arm, Size
from ablations.runner import run
from ablations.runner.worker import make

__all__ = ["PRESET", "SIZE", "TINY", "here", "run"]

TINY = MoEConfig(
    vocab_size=256,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=16,
    dense_hidden=16,
    expert_hidden=8,
    num_experts=4,
    top_k=1,
    moe_layers=(0,),
    expert_compute="grouped",
)
SIZE = Size(
    model=TINY,
    steps=6,
    batch=2,
    length=16,
    grid=(1e-3, 3e-3),
    shared_lr=1e-3,
    seeds=(0, 1),
    evaluations=2,
    eval_batches=4,
    eval_batch=2,
)
PRESET = Ablation(
    name="tiny",
    question="Does it run?",
    decides="It does if it runs.",
    arms={"sinkgd": Arm("sinkgd"), "mesh": Arm("mesh"), "adamw": Arm("adamw(weight_decay=0.0)")},
    baseline="sinkgd",
    sizes={"cpu": SIZE},
)


def here(jobs: Sequence[Job], *, workers: int, on_steps: OnSteps) -> Iterator[Outcome]:
    """Runs in this process: what a worker does, without its start."""
    with open(os.devnull, "w") as nowhere:
        for job in jobs:
            yield Outcome(job.id, make({"spec": dict(job.spec), "root": job.root, "plugins": []}, nowhere, set()))


if "here" not in EXECUTORS.names():  # this file is loaded by several tests
    EXECUTORS.add(Executor("here", "in this process", here))
