"""Traces of several ranks that lie, lack a rank, or do not fit together: one clear line, and no memory for it."""

from __future__ import annotations

import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from traces import NotRecorded, TraceError, open_trace
from traces.recover import recover
from traces.synthetic import write_synthetic
from traces.verify import verify_trace

_HERE = str(Path(__file__).parent.parent / "test_traces")
sys.path.insert(0, _HERE)
_folders = __import__("rank_folders")
sys.path.remove(_HERE)
forge, forge_top, write_ranks = _folders.forge, _folders.forge_top, _folders.write_ranks

UP = "layers.0.mlp.experts.gate_up_proj"
ONE = "rank-00001"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "one.trace"
    write_synthetic(path, steps=8, chunk_steps=4, layers=2, num_experts=5, tokens=30, width=4, hidden=4)
    return path


@pytest.fixture(scope="module")
def sound(whole: Path) -> Path:
    write_ranks(whole, whole.parent / "two.trace")
    return whole.parent / "two.trace"


@pytest.fixture
def broken(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "b.trace")
    return tmp_path / "b.trace"


@pytest.fixture
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def read_all(path: Path) -> None:
    trace = open_trace(path)
    for step in trace.all_steps:
        for name in trace.infos:
            for stream in ("gradient", "weight"):
                trace.raw(stream, name, step)
            trace.presence(name, step)
    trace.scalars()
    for layer in trace.layers:
        list(trace.routing_steps(layer.layer))
    trace.routing().collect()


def test_the_two_traces_are_one(whole: Path, sound: Path) -> None:
    one, two = open_trace(whole), open_trace(sound)
    assert two.verify() == []
    assert two.steps == one.steps
    for step in one.all_steps:
        for name in one.infos:
            assert (two.presence(name, step) == one.presence(name, step)).all()
            for stream in ("gradient", "weight"):
                mine, other = one.raw(stream, name, step), two.raw(stream, name, step)
                assert (mine is None) == (other is None)
                if mine is not None and other is not None:
                    assert mine.data.tobytes() == other.data.tobytes(), (name, stream, step)
        for layer in one.layers:
            mine, other = one.routing_step(step, layer.layer), two.routing_step(step, layer.layer)
            if mine is not None and other is not None:
                assert mine.topk_expert_ids.tolist() == other.topk_expert_ids.tolist()
                assert mine.tokens_per_expert.tolist() == other.tokens_per_expert.tolist()


def param(value: dict[str, Any], name: str = UP) -> dict[str, Any]:
    found: dict[str, Any] = next(p for p in value["own"]["params"] if p["name"] == name)
    return found


def placed(axes: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda v: v["placements"].update({UP: axes})


CASES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "overlapping offsets": (placed({"0": [[2, 3]]}), "ranks 0 and 1 hold the same part"),
    "a gap": (placed({"0": [[4, 1]]}), "no rank holds axis 0, index 3"),
    "an id out of range": (placed({"0": [[3, 3]]}), "must be an integer from 0 to 2"),
    "an id twice": (placed({"0": [[3, 2], [4, 1]]}), "index 4 is listed twice"),
    "an axis that is none": (placed({"7": [[3, 2]]}), "no axis of shape"),
    "a huge count": (placed({"0": [[0, 10**12]]}), "must be an integer from 0 to 5"),
    "a part and the whole": (lambda v: v["placements"].pop(UP), "holds a part of it and rank 1 the whole"),
    "nobody writes the rest": (placed(None), "no rank holds axis 0, index 3 to 4"),  # type: ignore[arg-type]
    "a parameter nobody knows": (lambda v: v["placements"].update(ghost=None), "no parameter of this rank"),
    "another shape": (lambda v: param(v).update(shape=[5, 9, 4]), "is routed_expert (5, 9, 4)"),
    "another role": (lambda v: param(v).update(role="other"), "is other"),
    "another layer": (lambda v: v["own"]["layers"][0].update(num_experts=6), "with 6 experts, another rank says"),
    "another number of ranks": (lambda v: v.update(ranks=3), "another number of ranks"),
    "other ranks in its tables": (lambda v: v["own"].update(ranks=4), "own says 4 ranks"),
    "another trace's hash": (lambda v: v.update(header="0" * 64), "belongs to another trace"),
    "offsets of a newer format": (lambda v: v.update(expert_offsets={"a": 1}), "needs a newer gradreel"),
    "an unknown field": (lambda v: v.update(mood="good"), "mood"),
}


@pytest.mark.parametrize("name", CASES)
def test_headers_that_do_not_fit(name: str, broken: Path, little_memory: None) -> None:
    change, says = CASES[name]
    forge(broken / ONE, "header.json", change)
    with pytest.raises(TraceError) as error:
        read_all(broken)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert any(says in f.message for f in verify_trace(broken) if f.severity == "damage")


def test_declared_ranks_cost_nothing(broken: Path, little_memory: None) -> None:
    for count, says in ((10**9, "must be an integer from 1 to 100000"), (90000, "ranks 2 to 89999 in all")):
        copy = broken.with_name(f"{count}.trace")
        shutil.copytree(broken, copy)
        forge_top(copy, lambda v, count=count: v.update(ranks=count))
        with pytest.raises(TraceError, match=says):
            open_trace(copy)
        assert any(says in f.message for f in verify_trace(copy))


def test_a_missing_rank(broken: Path, whole: Path) -> None:
    shutil.rmtree(broken / ONE)
    with pytest.raises(TraceError, match=r"rank-00001 is missing.*2 ranks.*partial=True"):
        open_trace(broken)
    assert any("rank-00001 is missing" in f.message for f in verify_trace(broken) if f.severity == "damage")
    trace, one = open_trace(broken, partial=True), open_trace(whole)
    assert trace.steps == one.steps
    assert not trace.finished
    with pytest.raises(NotRecorded, match=r"index 3 to 4 is missing; rank 1 sealed no step 2"):
        trace.gradient(UP, 2)
    mine, other = trace.raw("gradient", UP, 2, experts=[2, 0]), one.raw("gradient", UP, 2, experts=[2, 0])
    assert mine is not None
    assert other is not None
    assert mine.data.tobytes() == other.data.tobytes()
    assert trace.presence(UP, 2)[3:].tolist() == [0, 0]
    assert trace.routing_step(2, 0) is None
    assert set(trace.routing().collect()["rank"]) == {0}
    assert recover(broken).steps == []


def test_a_rank_that_stopped_early(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    write_ranks(whole, path, until=(8, 5), chunk_steps=1)
    assert open_trace(path).steps == [1, 2, 3, 4, 5]
    with pytest.raises(NotRecorded, match=r"step 7 is not in t.trace.*rank 1 did not seal that step.*partial=True"):
        open_trace(path).gradient(UP, 7)
    trace = open_trace(path, partial=True)
    assert trace.steps == list(range(1, 9))
    with pytest.raises(NotRecorded, match="rank 1 sealed no step 7"):
        trace.gradient(UP, 7)
    assert trace.gradient(UP, 7, experts=[0, 1, 2]) is not None
    assert {f.severity for f in verify_trace(path)} == {"note"}
    assert any(f.steps == (6, 8) and f.file == ONE for f in verify_trace(path))
    recovered = recover(path)
    assert recovered.steps == [1, 2, 3, 4, 5]
    assert open_trace(path).finished


def test_a_rank_that_died_before_its_first_seal(broken: Path) -> None:
    shutil.rmtree(broken / ONE)
    (broken / ONE).mkdir()
    with pytest.raises(TraceError, match="holds nothing yet"):
        open_trace(broken)
    assert open_trace(broken, partial=True).missing_ranks == "rank 1"


def test_one_flipped_bit_in_any_rank_is_found(sound: Path, tmp_path: Path) -> None:
    for file in sorted((sound / ONE).iterdir()):
        copy = tmp_path / file.name
        shutil.copytree(sound, copy)
        raw = bytearray((copy / ONE / file.name).read_bytes())
        raw[len(raw) // 2] ^= 4
        (copy / ONE / file.name).write_bytes(raw)
        found = [f for f in verify_trace(copy) if f.severity == "damage"]
        assert found, file.name
        assert any(f"{ONE}/{file.name}" in f.file or file.name in f.message for f in found)
        shutil.rmtree(copy)


def test_a_tensor_of_another_shape_than_its_part(broken: Path) -> None:
    """Rank 1 says that it holds another stretch of the columns than its chunk does."""
    name = "layers.1.mlp.gate.weight"
    trace = open_trace(broken)
    assert trace.param(name).expert_axis is None
    forge(broken / "rank-00000", "header.json", lambda v: v["placements"].update({UP: {"0": [[0, 2]]}}))
    forge(broken / ONE, "header.json", placed({"0": [[2, 3]]}))
    with pytest.raises(TraceError, match=r"has shape \(3, .*, not \(2, "):
        open_trace(broken).gradient(UP, 1)
    assert any("has shape" in f.message for f in verify_trace(broken))


def test_two_parameters_under_one_name(whole: Path, tmp_path: Path) -> None:
    """Ranks that both write a parameter whole must write the same bits, or it is not the same parameter."""
    from dataclasses import replace

    import numpy as np

    from traces.schema import Header, LayerInfo, RawTensor, StepRecord
    from traces.views import ParamInfo
    from traces.writer import TraceWriter

    header = Header(params=(ParamInfo("w", "norm", (2,)),), layers=(LayerInfo(0, "m", 4, 1),), ranks=2)
    for rank in (0, 1):
        with TraceWriter(tmp_path / "x", replace(header), rank=rank) as writer:
            for step in (1, 2):
                data = np.full(2, step + 10 * rank * (step == 2), np.float32)
                writer.append(StepRecord(step, {("gradient", "w"): RawTensor("float32", data.shape, data)}))
    (found,) = verify_trace(tmp_path / "x")
    assert found.severity == "damage"
    assert "gradient of 'w' at step 2 differs between rank 0 and rank 1" in found.message
    assert "global_names" in found.message
