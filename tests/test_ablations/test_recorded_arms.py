"""Arms of an experiment that train on the baseline's recorded routing."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ablations.presets import Ablation, Arm
from ablations.runner._plan import Plan
from ablations.runner._reel import ensure_routing, reel_path
from ablations.runner._run import make_runs
from ablations.runner._spec import RunSpec, run_spec
from ablations.runner._store import read_run_frame
from traces.errors import GradreelError, UnknownName
from traces.reader import open_trace

_FILE = Path(__file__).with_name("tiny_experiment.py")
_SPEC = importlib.util.spec_from_file_location("tiny_experiment", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny)

SIZE = replace(tiny.SIZE, steps=4, seeds=(0,))
ARMS = {
    "sinkgd": Arm("sinkgd"),
    "same": Arm("sinkgd", routing="recorded"),
    "mesh": Arm("mesh", routing="recorded"),
}
PRESET = Ablation("forced", "?", ".", ARMS, "sinkgd", {"cpu": SIZE}, ways=("shared",))


def test_an_arm_trains_on_the_baselines_routing(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    made = make_runs(PRESET, SIZE, tmp_path, executor="here")
    assert not made.failed
    ids = {cell.arm: specs[0].id for cell, specs in made.plan.cells.items() if cell.way == "shared"}
    assert len(set(ids.values())) == 3
    base, same = (read_run_frame(tmp_path, ids[arm])["value"] for arm in ("sinkgd", "same"))
    assert base.to_list() == same.to_list()  # its own routing, so the same run
    assert made.runs[ids["mesh"]].final_loss != made.runs[ids["sinkgd"]].final_loss
    trace = open_trace(reel_path(tmp_path, ids["sinkgd"]))
    assert trace.steps == [1, 2, 3, 4]
    assert trace.streams == ("routing", "scalars")


def test_an_unfinished_reel_is_recorded_anew(tmp_path: Path) -> None:
    spec = run_spec(replace(SIZE, steps=2), "sinkgd", 1e-3, 0)
    path = ensure_routing(spec, tmp_path)
    (path / "rank-00000" / "end.json").unlink()
    assert open_trace(ensure_routing(spec, tmp_path)).finished
    assert ensure_routing(spec, tmp_path) == path


def test_runs_without_it_keep_their_names() -> None:
    plain = run_spec(SIZE, "mesh", 1e-3, 0)
    assert plain.id != replace(plain, routing="0" * 16).id
    old = {k: v for k, v in plain.to_dict().items() if k != "routing"}
    assert RunSpec.from_dict(old).id == plain.id
    assert np.unique([s.routing is None for s in Plan(tiny.PRESET, tiny.SIZE).first()]).tolist() == [True]


def test_what_cannot_be_is_one_line() -> None:
    with pytest.raises(UnknownName, match="routing of an arm"):
        Arm("mesh", routing="forced")
    with pytest.raises(GradreelError, match="the baseline's routing is what others train on"):
        replace(PRESET, baseline="same")
