"""Runs made by a Ray cluster on this machine equal those made here, and one that dies takes none with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import polars as pl
import pytest

from ablations.executors import EXECUTORS, Job
from traces.errors import GradreelError

pytest.importorskip("ray", reason="the extra `ray` is not installed")

_SPEC = importlib.util.spec_from_file_location("tiny_experiment", Path(__file__).with_name("tiny_experiment.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny)


def test_two_workers_give_the_frame_of_one_process_and_a_dead_one_is_a_line(tmp_path: Path) -> None:
    import ray

    here = tiny.run(tiny.PRESET, out=tmp_path / "here", executor="here").frame
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        there = tiny.run(tiny.PRESET, out=tmp_path / "there", executor="ray", workers=2)
        assert isinstance(there.frame, pl.DataFrame)
        assert here.equals(there.frame)  # to the last bit
        sound = Job("sound", _spec(), str(tmp_path / "jobs"))
        broken = Job("broken", {**_spec(), "data": {"source": "text", "options": {"path": "none"}}}, sound.root)
        dead = Job("dead", _spec(), sound.root, plugins=(str(_killer(tmp_path)),))
        outcomes = {o.id: o.error for o in EXECUTORS.get("ray").run([broken, dead, sound], workers=2, on_steps=_ignore)}
    finally:
        ray.shutdown()
    assert outcomes["sound"] is None
    assert "cannot be read" in str(outcomes["broken"])
    assert str(outcomes["dead"]).startswith("its worker died")
    assert "\n" not in str(outcomes["dead"])


def test_no_workers_are_refused() -> None:
    with pytest.raises(GradreelError, match="workers is 0"):
        next(EXECUTORS.get("ray").run([], workers=0, on_steps=_ignore))


def _spec() -> dict:
    from ablations.runner._spec import run_spec

    return run_spec(tiny.SIZE, "sinkgd+adam_rest", 1e-3, 0).to_dict()


def _killer(folder: Path) -> Path:
    file = folder / "killer.py"
    file.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    return file


def _ignore(run_id: str, count: int) -> None: ...
