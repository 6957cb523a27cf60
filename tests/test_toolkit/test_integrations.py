"""Every example script runs, and what it recorded replays to the weights it trained."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.replay import replay
from traces import open_trace

STEPS = 4
#: Bit for bit, or the largest difference: momentum that backward adds onto is clipped behind that sum, which rounds
#: once more.
EXAMPLES = {"plain_loop": 1e-7, "accelerate_loop": 0.0, "huggingface_trainer": 0.0, "lightning_fit": 1e-7}
RECIPE = "mesh(lr=0.003)"


def test_every_example_is_tested() -> None:
    folder = Path(importlib.import_module("ablations.examples").__file__ or "").parent
    assert {p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")} == set(EXAMPLES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    losses = importlib.import_module(f"ablations.examples.{name}").main(path, STEPS)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    trace = open_trace(path)
    assert trace.finished
    assert trace.steps == list(range(1, STEPS + 1))
    assert trace.verify() == []
    check = replay(trace, [RECIPE], metrics=["update_rms"], lr="recorded").selfcheck(RECIPE)
    assert check.comparable
    assert check.max_difference <= EXAMPLES[name], check.message
    # Accumulation: each step of the two frameworks that accumulate holds two micro-steps.
    micro = trace.routing().collect()["micro_step"].n_unique()
    assert micro == (2 if name in ("accelerate_loop", "huggingface_trainer") else 1)


def test_lightning_and_a_plain_loop_train_the_same(tmp_path: Path) -> None:
    from ablations.examples import lightning_fit, plain_loop

    plain = plain_loop.main(tmp_path / "plain.trace", STEPS)
    assert lightning_fit.main(tmp_path / "lightning.trace", STEPS) == plain


def test_accelerate_prepares_attached_momentum_too() -> None:
    # `prepare` loads the fresh optimizer's own state back into it, which must not count as history.
    from accelerate import Accelerator

    from ablations.examples._small import batches, small_model
    from toolkit.optim import make_optimizer

    def run(prepare: bool) -> list[torch.Tensor]:
        model: Any = small_model()
        optimizer: Any = make_optimizer(model, "mesh")
        backward: Any = torch.Tensor.backward
        if prepare:
            accelerator = Accelerator(cpu=True)
            model, optimizer = accelerator.prepare(model, optimizer)
            backward = accelerator.backward
        for step, batch in enumerate(batches(4)):
            backward(model(**batch).loss)
            experts = next(p for p in model.parameters() if p.dim() == 3)
            assert (experts.grad is None) == (step > 0), "attached from the second step on"
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    for mine, other in zip(run(True), run(False), strict=True):
        assert torch.equal(mine, other)


def test_a_recording_survives_a_failing_run(tmp_path: Path) -> None:
    import lightning

    from ablations.examples.lightning_fit import Task, batches
    from traces.integrations.lightning import RecorderCallback

    class Failing(Task):
        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            if index == 3:
                raise RuntimeError("out of luck")
            return super().training_step(batch, index)

    trainer = lightning.Trainer(
        max_steps=9,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[RecorderCallback(tmp_path / "run.trace")],
    )
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit(Failing("adamw"), torch.utils.data.DataLoader(batches(5), batch_size=None))
    assert open_trace(tmp_path / "run.trace").steps == [1, 2, 3]


def test_the_packages_alone_load_no_framework() -> None:
    code = (
        "import sys, json, traces.integrations, ablations.examples, toolkit.optim;"
        "print(json.dumps([m for m in ('lightning', 'accelerate', 'transformers') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
