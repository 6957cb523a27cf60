"""A run by two processes is that of one, up to roundings, and a run whose process dies takes no other with it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from ablations.executors import EXECUTORS, Job
from ablations.runner._execute import execute
from ablations.runner._spec import RunSpec, run_spec
from ablations.runner._store import finished, read_run_frame
from traces.errors import GradreelError

_SPEC = importlib.util.spec_from_file_location("tiny_experiment", Path(__file__).with_name("tiny_experiment.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny)


def spec_of(**changes: object) -> RunSpec:
    # Without the balance loss, which each rank takes over its own tokens.
    size = replace(tiny.SIZE, model=replace(tiny.TINY, aux_coefficient=0.0, router_weights="softmax_topk"), **changes)
    return run_spec(size, "mesh+adam_rest", 1e-3, 0)


def test_two_processes_make_the_run_of_one_and_failures_stay_alone(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    spec = spec_of()
    killer = tmp_path / "killer.py"
    dies = "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    killer.write_text(f"import os, signal, time\n{dies}time.sleep(60)\n")
    jobs = [
        Job("dead", spec.to_dict(), str(together), plugins=(str(killer),)),
        Job("odd", spec_of(batch=3).to_dict(), str(together)),
        Job(spec.id, spec.to_dict(), str(together)),
    ]
    torchrun = EXECUTORS.get("torchrun").run
    outcomes = {o.id: o.error for o in torchrun(jobs, workers=2, on_steps=lambda run_id, count: None)}
    assert str(outcomes["dead"]).startswith("its processes died")
    assert "a batch of 3 cannot be dealt to 2 processes" in str(outcomes["odd"])
    assert outcomes[spec.id] is None
    assert not any("\n" in error for error in outcomes.values() if error)
    one, two = execute(spec, alone), finished(together, spec.id)
    assert two is not None
    assert two.final_loss == pytest.approx(one.final_loss, rel=1e-5)
    assert (two.weights_sha256, two.batches_sha256) == (one.weights_sha256, one.batches_sha256)
    frames = [read_run_frame(root, spec.id).filter(pl.col("metric") == "loss")["value"] for root in (alone, together)]
    assert len(frames[0]) == spec.steps
    assert frames[1].to_list() == pytest.approx(frames[0].to_list(), rel=1e-5)


def test_no_processes_are_refused() -> None:
    with pytest.raises(GradreelError, match="workers is 0"):
        next(EXECUTORS.get("torchrun").run([], workers=0, on_steps=lambda run_id, count: None))
