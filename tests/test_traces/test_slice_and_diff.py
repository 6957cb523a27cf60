"""Parts of traces, and where two traces differ first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ablations.cli import build_app
from traces import GradreelError, open_trace
from traces.console import run
from traces.differences import first_difference
from traces.schema import Header, LayerInfo, RawTensor, RoutingRecord, StepRecord
from traces.slicing import ids_of, slice_trace, steps_between
from traces.synthetic import write_synthetic
from traces.views import ParamInfo
from traces.writer import TraceWriter


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "whole.trace"
    write_synthetic(path, steps=8, chunk_steps=3, num_experts=4, tokens=32, width=4, hidden=4, padding=0.2, layers=2)
    return path


def test_a_slice_of_everything_is_equal(whole: Path, tmp_path: Path) -> None:
    trace = open_trace(whole)
    cut = slice_trace(trace, tmp_path / "all.trace")
    again = open_trace(tmp_path / "all.trace")
    assert cut.steps == trace.all_steps
    assert cut.begins_with_weights
    assert again.verify() == []
    assert first_difference(trace, again) is None
    assert again.header.run == trace.header.run
    assert again.header.provenance["slice"]["id"] == trace.id
    assert {k: v for k, v in again.header.provenance.items() if k != "slice"} == trace.header.provenance


def test_steps_params_and_experts_are_those_asked_for(whole: Path, tmp_path: Path) -> None:
    trace = open_trace(whole)
    cut = slice_trace(trace, tmp_path / "a.trace", steps=(3, 6), params="*layers.1*experts*", experts=[3, 0])
    part = open_trace(tmp_path / "a.trace")
    assert part.verify() == []
    assert cut.steps == part.steps == [3, 4, 5, 6]
    assert part.header.provenance["slice"] == {
        "of": "whole.trace",
        "id": trace.id,
        "steps": [3, 6],
        "params": "*layers.1*experts*",
        "experts": [0, 3],
    }
    names = [name for name in trace.infos if "layers.1" in name and "experts" in name]
    assert list(part.infos) == names
    assert sorted(n for group in part.header.run["groups"] for n in group["params"]) == sorted(names)
    for step in part.steps:
        for name in names:
            assert part.experts(name, step).tolist() == [0, 3]  # type: ignore[union-attr]
            codes = trace.presence(name, step)
            assert part.presence(name, step).tolist() == [codes[0], 0, 0, codes[3]]
            raw, mine = trace.raw("gradient", name, step, [0, 3]), part.raw("gradient", name, step)
            assert raw is not None
            assert mine is not None
            assert raw.data.tobytes() == mine.data.tobytes()
        for layer in (0, 1):
            a, b = trace.routing_step(step, layer), part.routing_step(step, layer)
            assert a is not None
            assert b is not None
            assert np.array_equal(a.topk_expert_ids, b.topk_expert_ids)
            assert np.array_equal(a.is_pad, b.is_pad)
    scalars = trace.scalars()
    assert part.scalars().equals(scalars.filter(scalars["step"].is_between(3, 6)))


def test_the_outcome_of_the_last_step_is_kept(tmp_path: Path) -> None:
    """Weights that stand one step past the slice make its self-check possible."""
    header = Header(params=(ParamInfo("w", "router", (2, 2)),), streams=("gradient", "weight"))
    with TraceWriter(tmp_path / "w.trace", header) as writer:
        for step in range(1, 6):
            data = np.full((2, 2), step, np.float32)
            raw = RawTensor("float32", (2, 2), data)
            writer.append(StepRecord(step, {("gradient", "w"): raw, ("weight", "w"): raw}))
    slice_trace(open_trace(tmp_path / "w.trace"), tmp_path / "part.trace", steps=(2, 3))
    part = open_trace(tmp_path / "part.trace")
    assert part.steps == [2, 3]
    assert part.all_steps == [2, 3, 4]
    assert part.weight_steps() == [2, 3, 4]
    assert part.raw("gradient", "w", 4) is None


def test_a_slice_is_replayed_as_its_steps_were(whole: Path, tmp_path: Path) -> None:
    from toolkit import replay

    slice_trace(open_trace(whole), tmp_path / "a.trace", steps=(None, 4))
    frames = [replay(open_trace(p), ["sgd"], ["update_rms"], steps=(1, 4)).frame for p in (whole, tmp_path / "a.trace")]
    columns = ["step", "param", "metric", "value"]
    assert frames[0].select(columns).equals(frames[1].select(columns))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": (100, None)}, "no step of whole.trace is from 100 to None; it has 1 to 9"),
        ({"params": "nothing*"}, "no parameter of whole.trace matches 'nothing"),
        ({"experts": [4]}, r"experts \[4\] are not all from 0 to 3"),
        ({"experts": [-1]}, r"experts \[-1\] are not all"),
        ({"experts": []}, "are not all from 0 to 3"),
    ],
)
def test_what_cannot_be_cut(whole: Path, tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(GradreelError, match=says):
        slice_trace(open_trace(whole), tmp_path / "a.trace", **options)
    assert not (tmp_path / "a.trace").exists()


def test_the_words_of_the_options() -> None:
    assert steps_between("10:20") == (10, 20)
    assert steps_between(":") == (None, None)
    assert ids_of("0,4,8-11") == [0, 4, 8, 9, 10, 11]
    for wrong in ("", "10", "a:b", "1:2:3"):
        with pytest.raises(GradreelError, match="is not FIRST:LAST"):
            steps_between(wrong)
    for wrong in ("", "a", "1-", "-1", "1,,2", "0-99999999"):
        with pytest.raises(GradreelError, match="no list of ids"):
            ids_of(wrong)


# ------------------------------------------------------------------------------------------------------------- diff

HEADER = Header(
    params=(ParamInfo("w", "routed_expert", (2, 3), expert_axis=0, num_experts=2),), layers=(LayerInfo(0, "m", 4, 2),)
)


def write(path: Path, **changes: Any) -> Path:
    """Four steps; `changes` make step 3 another."""
    with TraceWriter(path, HEADER) as writer:
        for step in range(1, 5):
            other = changes if step == 3 else {}
            data = np.full((2, 3), step, np.float32)
            for index, value in other.get("elements", {}).items():
                data.reshape(-1)[index] = value
            ids = np.full((5, 2), step % 4)
            ids[4, 1] = other.get("id", ids[4, 1])
            raw = RawTensor("float32", (2, 3), data)
            tensors = {("gradient", "w"): raw, **({("grad_buffer", "w"): raw} if "stream" in other else {})}
            presence = {"w": np.array([3, other.get("presence", 3)], np.uint8)}
            routing = [RoutingRecord(0, 0, ids[: other.get("tokens", 5)], np.zeros(5, bool)[: other.get("tokens", 5)])]
            scalars = {"loss": other.get("loss", float("nan")), "step_ms": float(hash(str(path)) % 100)}
            if step != other.get("leave_out"):
                writer.append(StepRecord(step, tensors, presence, routing=routing, scalars=scalars))
    return path


@pytest.mark.parametrize(
    ("changes", "what", "how"),
    [
        (
            {"elements": {4: 9.0}},
            "gradient of w",
            r"3.0 against 9.0 at \[1, 1\]; 1 of 6 elements differ, by at most 6$",
        ),
        (
            {"elements": {0: float("nan"), 1: 5.0}},
            "gradient of w",
            r"3.0 against nan at \[0, 0\]; 2 of 6 .* by at most 2",
        ),
        ({"elements": {5: float("inf")}}, "gradient of w", "3.0 against inf"),
        ({"loss": 2.0}, "scalar 'loss'", "nan against 2.0"),
        ({"presence": 2}, "presence of w", "expert 1"),
        ({"id": 0}, "routing of layer 0", r"topk_expert_ids of token 4: \[3, 3\] against \[3, 0\]"),
        ({"tokens": 4}, "routing of layer 0", "5 tokens against 4"),
        ({"stream": True}, "grad_buffer of w", "is only in .*b.trace"),
        ({"leave_out": 3}, "the step", "is only in .*a.trace"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, changes: dict[str, Any], what: str, how: str) -> None:
    import re

    a, b = open_trace(write(tmp_path / "a.trace")), open_trace(write(tmp_path / "b.trace", **changes))
    found = first_difference(a, b)
    assert found is not None
    assert (found.step, found.what) == (3, what)
    assert re.search(how, found.how), found.how
    assert first_difference(a, b, steps=(1, 2)) is None
    assert first_difference(a, open_trace(write(tmp_path / "c.trace"))) is None


def test_bits_are_compared_and_not_values(tmp_path: Path) -> None:
    """-0.0 is not 0.0, and a NaN is itself."""
    a = open_trace(write(tmp_path / "a.trace", elements={0: 0.0}))
    b = open_trace(write(tmp_path / "b.trace", elements={0: -0.0}))
    found = first_difference(a, b)
    assert found is not None
    assert "0.0 against -0.0" in found.how
    a, b = (open_trace(write(tmp_path / f"{n}.trace", elements={0: float("nan")})) for n in ("c", "d"))
    assert first_difference(a, b) is None


def test_what_cannot_be_compared_is_told(tmp_path: Path, whole: Path) -> None:
    a = open_trace(write(tmp_path / "a.trace"))
    with pytest.raises(GradreelError, match=r"cannot be compared: parameter '.*' is only in whole.trace"):
        first_difference(a, open_trace(whole))
    with TraceWriter(tmp_path / "s.trace", Header(params=(ParamInfo("w", "router", (2, 4)),))) as writer:
        writer.append(StepRecord(1))
    with pytest.raises(GradreelError, match=r"shape of 'w' is \(2, 3\) in one, \(2, 4\) in the other"):
        first_difference(a, open_trace(tmp_path / "s.trace"))
    with pytest.raises(GradreelError, match="no step in common"):
        first_difference(a, a, steps=(9, None))


def test_the_verbs_and_their_exit_codes(tmp_path: Path, whole: Path, capsys: Any) -> None:
    a, b = write(tmp_path / "a.trace"), write(tmp_path / "b.trace", elements={4: 9.0})
    assert run(build_app(), ["diff", str(a), str(a)]) == 0
    assert "are equal, bit by bit" in capsys.readouterr().out
    assert run(build_app(), ["diff", str(a), str(b)]) == 1
    assert "differ first at step 3: gradient of w: 3.0 against 9.0" in capsys.readouterr().err
    assert run(build_app(), ["diff", str(a), str(whole)]) == 2
    small = tmp_path / "small.trace"
    assert run(build_app(), ["slice", str(whole), str(small), "--steps", "2:3", "--experts", "0-1"]) == 0
    assert "2 steps (2 to 3), 6 parameters; no weights at its first step" in capsys.readouterr().out
    assert run(build_app(), ["verify", str(small)]) == 0
    assert run(build_app(), ["slice", str(whole), str(small)]) == 2
    assert "already holds a trace" in capsys.readouterr().err


def test_a_damaged_trace_is_neither_cut_nor_compared(tmp_path: Path, whole: Path) -> None:
    broken = tmp_path / "broken.trace"
    shutil.copytree(whole, broken)
    chunk = next(broken.rglob("chunk-000001.safetensors"))
    raw = bytearray(chunk.read_bytes())
    raw[-1] ^= 1
    chunk.write_bytes(raw)
    for action in (
        lambda: slice_trace(open_trace(broken), tmp_path / "a.trace"),
        lambda: first_difference(open_trace(broken), open_trace(whole)),
    ):
        with pytest.raises(GradreelError, match=r"chunk-000001.safetensors \(steps 4 to 6\) is damaged"):
            action()
