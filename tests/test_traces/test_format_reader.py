"""Reading: lazy slices, what was not recorded, unfinished traces, several ranks."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import traces.chunks
from traces import NotRecorded, RecordAt, TraceError, open_trace
from traces.errors import UnknownName
from traces.reader import Trace
from traces.recover import recover
from traces.schema import Header, LayerInfo, RawTensor, RoutingRecord, StepRecord
from traces.synthetic import write_synthetic
from traces.views import NONE, ZERO, ParamInfo
from traces.writer import TraceWriter

UP = "layers.0.mlp.experts.gate_up_proj"
GATE = "layers.0.mlp.gate.weight"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("t") / "a.trace"
    write_synthetic(
        path, steps=20, layers=2, at=RecordAt(bursts=(4, 8), budget=None), idle_runs={2: (2, 3)}, padding=0.5
    )
    return open_trace(path)


def raw(array: np.ndarray) -> RawTensor:
    return RawTensor("float32", array.shape, np.ascontiguousarray(array, np.float32))


def test_steps_and_bursts(trace: Trace) -> None:
    assert trace.bursts() == [(1, 4), (9, 12), (17, 20)]
    assert trace.recorded_steps() == trace.steps
    assert not trace.contiguous()
    assert trace.all_steps == list(range(1, 22))
    assert trace.weight_steps() == trace.weight_steps(UP) == [1, 21]
    assert RecordAt.from_json(trace.header.record).bursts == (4, 8)


def test_a_slice_equals_the_whole_indexed(trace: Trace) -> None:
    whole = trace.gradient(UP, 9)
    assert whole is not None
    for experts in ([0], [7, 0, 3], [2, 3, 4], [5, 5], []):
        part = trace.gradient(UP, 9, experts=experts)
        assert part is not None
        assert torch.equal(part, whole[torch.tensor(experts, dtype=torch.long)])


def test_a_slice_along_another_axis(tmp_path: Path) -> None:
    info = ParamInfo("w", "routed_expert", (3, 4, 2), expert_axis=1, num_experts=4, matrix_axes=(0, 2))
    data = np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    with TraceWriter(tmp_path / "x", Header(params=(info,))) as writer:
        writer.append(StepRecord(1, {("gradient", "w"): raw(data)}))
        writer.append(StepRecord(2, {("gradient", "w"): raw(data[:, [1, 3]])}, experts={"w": np.array([1, 3])}))
    trace = open_trace(tmp_path / "x")
    assert torch.equal(trace.gradient("w", 1, [3, 0]), torch.from_numpy(data[:, [3, 0]]))  # type: ignore[arg-type]
    assert torch.equal(trace.gradient("w", 2, [3]), torch.from_numpy(data[:, [3]]))  # type: ignore[arg-type]
    assert trace.experts("w", 2).tolist() == [1, 3]  # type: ignore[union-attr]
    with pytest.raises(NotRecorded, match="expert 0 of 'w' at step 2"):
        trace.gradient("w", 2, [0])


def test_only_the_slice_is_read(tmp_path: Path) -> None:
    """One expert of a 64 MiB stack costs about one expert of memory, once the chunk is checked."""
    experts = 64
    info = ParamInfo("w", "routed_expert", (experts, 512, 512), expert_axis=0, num_experts=experts)
    with TraceWriter(tmp_path / "x", Header(params=(info,))) as writer:
        writer.append(StepRecord(1, {("gradient", "w"): raw(np.ones((experts, 512, 512)))}))
    tracemalloc.start()
    part = open_trace(tmp_path / "x").raw("gradient", "w", 1, experts=[63])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part is not None
    assert part.shape == (1, 512, 512)
    assert peak < 6 << 20


def test_what_was_not_recorded_says_so(trace: Trace) -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: trace.gradient(UP, 5), NotRecorded, "only scalars were kept"),
        (lambda: trace.gradient(UP, 99), NotRecorded, "it holds 21 steps from 1 to 21"),
        (lambda: trace.weight(UP, 2), NotRecorded, "weights are stored at the first"),
        (lambda: trace.tensor("grad_buffer", UP, 2), NotRecorded, "the stream was not recorded"),
        (lambda: trace.gradient("layers.0.mlp.gate", 1), UnknownName, f"did you mean '{GATE}'"),
        (lambda: trace.gradient(GATE, 1, experts=[0]), NotRecorded, "no stack of experts"),
        (lambda: trace.gradient(UP, 1, experts=[8]), UnknownName, "0 to 7"),
        (lambda: next(trace.routing_steps(7)), UnknownName, "MoE layer '7'"),
    ]
    for call, kind, says in cases:
        with pytest.raises(kind) as error:
            call()
        assert says in str(error.value)
        assert "\n" not in str(error.value)


def test_none_and_zero_stay_what_they_were(tmp_path: Path) -> None:
    stack = ParamInfo("stack", "routed_expert", (2, 3), expert_axis=0, num_experts=2)
    single = ParamInfo("experts.0.w", "routed_expert", (3,), expert=0, num_experts=2)
    with TraceWriter(tmp_path / "x", Header(params=(stack, single))) as writer:
        zero = {("gradient", "stack"): raw(np.zeros((2, 3))), ("gradient", "experts.0.w"): raw(np.zeros(3))}
        presence = {"stack": np.full(2, ZERO, np.uint8), "experts.0.w": np.array(ZERO, np.uint8)}
        writer.append(StepRecord(1, zero, presence))
        presence = {"stack": np.full(2, NONE, np.uint8), "experts.0.w": np.array(NONE, np.uint8)}
        writer.append(StepRecord(2, {}, presence))
    trace = open_trace(tmp_path / "x")
    for name in ("stack", "experts.0.w"):
        assert torch.equal(trace.gradient(name, 1), torch.zeros(trace.param(name).shape))  # type: ignore[arg-type]
        assert trace.gradient(name, 2) is None
        assert (trace.presence(name, 1) == ZERO).all()
        assert (trace.presence(name, 2) == NONE).all()
    views = {(v.step, v.param.name): v for v in trace.views() if v.param}
    assert views[2, "stack"].gradient is None
    assert views[2, "stack"].presence.tolist() == [NONE, NONE]  # type: ignore[union-attr]


def test_views_come_in_step_order_with_loads_and_rates(trace: Trace) -> None:
    views = list(trace.views(params=[UP, GATE]))
    assert [v.step for v in views] == sorted(v.step for v in views)
    assert len(views) == len(trace.steps) * (2 + 2)
    up = next(v for v in views if v.param is not None and v.param.name == UP and v.step == 2)
    assert up.lr == 1e-2
    assert up.tokens_per_expert is not None
    assert up.tokens_per_expert[2] == 0
    assert up.tokens_per_expert.sum() == 128 * 2  # half of 256 tokens is padding, K is 2
    assert up.presence is not None
    assert (up.presence == np.where(up.tokens_per_expert > 0, 3, 2)).all()
    assert up.weight is None
    assert next(v for v in views if v.param is not None).weight is not None
    assert [v.step for v in trace.views(params=[UP], steps=[12, 9], streams=("gradient",))] == [9, 12]


def test_frames(trace: Trace) -> None:
    assert trace.params["role"].to_list() == ["router", "routed_expert", "routed_expert"] * 2
    scalars = trace.scalars()
    assert scalars.height == 21
    assert scalars["recorded"].sum() == 12
    assert scalars["lr"].dtype == pl.List(pl.Float64)
    loads = trace.routing().filter(~pl.col("is_pad"), pl.col("layer") == 1, pl.col("step") == 10)
    counts = loads.select(pl.concat_list("expert_0", "expert_1").explode().alias("e")).collect()["e"].value_counts()
    step = trace.routing_step(10, 1)
    assert step is not None
    assert {r["e"]: r["count"] for r in counts.to_dicts()} == {
        e: n for e, n in enumerate(step.tokens_per_expert.tolist()) if n
    }


def test_nonfinite_scalars_are_null_and_flagged(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    with TraceWriter(tmp_path / "x", Header()) as writer:
        writer.append(StepRecord(1, scalars={"loss": nan, "lr": [0.1, -inf], "note": "a"}, recorded=False))
        writer.append(StepRecord(2, scalars={"loss": 1, "lr": [0.1, 0.2], "extra": True, "note": 3}, recorded=False))
    frame = open_trace(tmp_path / "x").scalars()
    assert frame["loss"].to_list() == [None, 1.0]
    assert frame["lr"].to_list() == [[0.1, None], [0.1, 0.2]]
    assert frame["nonfinite"].to_list() == ["loss=nan, lr=[0.1, -inf]", ""]
    assert frame["note"].to_list() == ["a", "3"]
    assert frame["extra"].to_list() == [None, True]
    text = (tmp_path / "x" / "rank-00000" / "seal-000000.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_zero_tokens_and_no_routing(tmp_path: Path) -> None:
    layers = (LayerInfo(0, "a", 4, 2), LayerInfo(3, "b", 200, 3))
    empty = RoutingRecord(0, 0, np.empty((0, 2), np.int64), np.empty(0, bool))
    wide = RoutingRecord(3, 0, np.array([[199, -1, 3]]), np.array([False]))
    with TraceWriter(tmp_path / "x", Header(layers=layers), chunk_steps=2) as writer:
        writer.append(StepRecord(1, routing=[empty]))
        writer.append(StepRecord(2))
        writer.append(StepRecord(3, routing=[wide, empty]))
    trace = open_trace(tmp_path / "x")
    assert trace.verify() == []
    assert [(s.step, s.topk_expert_ids.shape, s.tokens_per_expert.tolist()) for s in trace.routing_steps(0)] == [
        (1, (0, 2), [0, 0, 0, 0]),
        (3, (0, 2), [0, 0, 0, 0]),
    ]
    step = trace.routing_step(3, 3)
    assert step is not None
    assert step.topk_expert_ids.tolist() == [[199, -1, 3]]
    assert trace.routing().collect()["expert_0"].dtype == pl.Int16
    assert open_trace(tmp_path / "x").routing().collect().height == 1


def test_an_empty_trace(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "x", Header()).close()
    trace = open_trace(tmp_path / "x")
    assert (trace.steps, trace.bursts(), trace.finished, trace.verify()) == ([], [], True, [])
    assert trace.contiguous()
    assert trace.routing().collect().height == trace.scalars().height == trace.params.height == 0
    assert list(trace.views()) == []


def test_scores_and_logits(tmp_path: Path) -> None:
    ids = np.array([[1, 0], [2, 3]])
    bf16 = RawTensor("bfloat16", (2, 2), np.array([[0x3F80, 0x3F00], [0, 0x4000]], np.uint16))
    record = RoutingRecord(0, 0, ids, np.zeros(2, bool), scores=bf16, logits=np.ones((2, 4), np.float32))
    with TraceWriter(tmp_path / "x", Header(layers=(LayerInfo(0, "m", 4, 2),))) as writer:
        writer.append(StepRecord(1, routing=[record]))
    trace = open_trace(tmp_path / "x")
    step = trace.routing_step(1, 0)
    assert step is not None
    assert step.scores.tolist() == [[1.0, 0.5], [0.0, 2.0]]  # type: ignore[union-attr]
    assert step.logits.shape == (2, 4)  # type: ignore[union-attr]
    assert trace.verify() == []


def test_the_learning_rate_is_found_by_group(tmp_path: Path) -> None:
    infos = (ParamInfo("a", "router", (1,)), ParamInfo("b", "norm", (1,)), ParamInfo("c", "norm", (1,)))
    run = {"groups": [{"params": ["a"]}, {"params": ["b"]}]}
    with TraceWriter(tmp_path / "x", Header(params=infos, run=run)) as writer:
        writer.append(StepRecord(1, scalars={"lr": [0.1, 0.2]}, recorded=False))
        writer.append(StepRecord(2, recorded=False))
    trace = open_trace(tmp_path / "x")
    assert [trace.lr(1, p) for p in "abc"] == [0.1, 0.2, None]
    assert trace.lr(2, "a") is None


def test_two_runs_into_one_folder_are_refused(tmp_path: Path) -> None:
    first = TraceWriter(tmp_path / "x", Header())
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter(tmp_path / "x", Header())
    first.close()
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter(tmp_path / "x", Header())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("mine")
    with pytest.raises(TraceError, match=r"not empty \(it holds 'todo.txt'\)"):
        TraceWriter(tmp_path / "notes", Header())
    assert [p.name for p in (tmp_path / "notes").iterdir()] == ["todo.txt"]
    with pytest.raises(TraceError, match="is not a folder"):
        TraceWriter(tmp_path / "notes" / "todo.txt", Header())


def test_opened_while_being_written(tmp_path: Path) -> None:
    info = ParamInfo("w", "router", (2,))
    writer = TraceWriter(tmp_path / "x", Header(params=(info,)), chunk_steps=2)
    for step in range(1, 6):
        writer.append(StepRecord(step, {("gradient", "w"): raw(np.full(2, step))}))
    view = open_trace(tmp_path / "x")
    assert (view.steps, view.finished, view.being_written) == ([1, 2, 3, 4], False, True)
    with pytest.raises(TraceError, match="being written by a running process"):
        recover(tmp_path / "x")
    writer.append(StepRecord(6, {("gradient", "w"): raw(np.full(2, 6))}))
    writer.close()
    assert view.steps == [1, 2, 3, 4]  # the view does not move under its reader
    assert torch.equal(view.gradient("w", 4), torch.full((2,), 4.0))  # type: ignore[arg-type]
    assert open_trace(tmp_path / "x").steps == [1, 2, 3, 4, 5, 6]
    assert view.id != open_trace(tmp_path / "x").id


def test_several_ranks_are_one_trace(tmp_path: Path) -> None:
    infos = (ParamInfo("w", "router", (2,)), ParamInfo("only_on_1", "norm", (2,)))
    header = Header(params=infos, layers=(LayerInfo(0, "m", 4, 1),), ranks=2)
    writers = [TraceWriter(tmp_path / "x", header, rank=r, chunk_steps=2) for r in (1, 0)][::-1]
    for step in range(1, 5):
        for rank, writer in enumerate(writers):
            if rank == 1 and step == 4:
                continue
            tensors = {("gradient", infos[rank].name): raw(np.full(2, 10 * rank + step))}
            ids = np.array([[rank], [step % 4]])
            writer.append(StepRecord(step, tensors, routing=[RoutingRecord(0, 0, ids, np.zeros(2, bool))]))
    writers[0].close()
    view = open_trace(tmp_path / "x")
    assert (view.steps, view.finished) == ([1, 2], False)  # rank 1 has sealed two steps
    writers[1].close()
    trace = open_trace(tmp_path / "x")
    assert trace.steps == [1, 2, 3]
    assert torch.equal(trace.gradient("only_on_1", 3), torch.full((2,), 13.0))  # type: ignore[arg-type]
    step = trace.routing_step(3, 0)
    assert step is not None
    assert step.topk_expert_ids.tolist() == [[0], [3], [1], [3]]
    assert trace.routing().collect().group_by("rank").len().sort("rank").rows() == [(0, 6), (1, 6)]
    (note,) = trace.verify()
    assert (note.severity, note.file, note.steps) == ("note", "rank-00001", (4, 4))
    with pytest.raises(TraceError, match="already holds a trace"):
        TraceWriter(tmp_path / "x", header, rank=1)


def test_a_record_that_does_not_fit_is_refused_and_the_writer_goes_on(tmp_path: Path) -> None:
    info = ParamInfo("w", "routed_expert", (4, 2), expert_axis=0, num_experts=4)
    header = Header(params=(info,), layers=(LayerInfo(0, "m", 4, 1),))
    good = raw(np.ones((4, 2)))
    pad = np.zeros(1, bool)
    bad = [
        (StepRecord(1), "steps must increase"),
        (StepRecord(2, {("gradient", "v"): good}), "'v' is not in the header's table"),
        (StepRecord(2, {("gradient", "w"): raw(np.ones((2, 4)))}), "shape (2, 4) is not (4, 2)"),
        (StepRecord(2, {("Gradient", "w"): good}), "not a stream name"),
        (StepRecord(2, {("gradient", "w"): replace(good, dtype="complex64")}), "'complex64' cannot be stored"),
        (StepRecord(2, {("gradient", "w"): replace(good, dtype="bfloat16")}), "needs an array of uint16"),
        (StepRecord(2, {("gradient", "w"): replace(good, shape=(3, 3))}), "shape (3, 3)"),
        (StepRecord(2, presence={"w": np.zeros(3, np.uint8)}), "one per expert"),
        (StepRecord(2, presence={"w": np.full(4, 9, np.uint8)}), "codes 0 to 3"),
        (StepRecord(2, experts={"w": np.array([2, 1])}), "strictly increasing"),
        (StepRecord(2, experts={"w": np.array([4])}), "ids from 0 to 3"),
        (StepRecord(2, routing=[RoutingRecord(1, 0, np.array([[0]]), pad)]), "layer 1 is not in the header"),
        (StepRecord(2, routing=[RoutingRecord(0, 0, np.array([[4]]), pad)]), "allowed are -1 to 3"),
        (StepRecord(2, routing=[RoutingRecord(0, 0, np.array([[0, 1]]), pad)]), "[T, K <= 1]"),
        (StepRecord(2, routing=[RoutingRecord(0, 0, np.array([[0]]), np.zeros(2, bool))]), "is_pad must be bool [1]"),
        (StepRecord(2, routing=[RoutingRecord(0, 0, np.array([[0]]), pad)] * 2), "twice"),
        (StepRecord(2, scalars={"loss": 1j}), "scalars of step 2.loss is a complex"),
        (StepRecord(2, scalars={"loss": 2**64}), "64 bits"),
    ]
    writer = TraceWriter(tmp_path / "x", header)
    writer.append(StepRecord(1, {("gradient", "w"): good}))
    for record, says in bad:
        with pytest.raises(TraceError) as error:
            writer.append(record)
        assert says in str(error.value)
        assert "\n" not in str(error.value)
    writer.append(StepRecord(2, {("gradient", "w"): good}))
    writer.close()
    with pytest.raises(TraceError, match="is closed"):
        writer.append(StepRecord(3))
    assert open_trace(tmp_path / "x").steps == [1, 2]


def test_a_header_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    twice = (ParamInfo("w", "router", (2,)), ParamInfo("w", "norm", (2,)))
    for header, says in [
        (Header(params=twice), "parameter 'w' is listed twice"),
        (Header(params=(ParamInfo("w", "gate", (2,)),)), "unknown role 'gate'"),
        (Header(params=(ParamInfo("w", "router", (2,), dtype="complex64"),)), "'complex64' cannot be stored"),
        (Header(params=(ParamInfo("w", "router", (2,), expert_axis=0, num_experts=3),)), "does not hold 3 experts"),
        (Header(run={"x": object()}), "header.run.x is a object"),
        (Header(ranks=0), "ranks must be an integer from 1"),
    ]:
        with pytest.raises(TraceError) as error:
            TraceWriter(tmp_path / "x", header, rank=0)
        assert says in str(error.value) or "ranks count from 0" in str(error.value)
        assert not (tmp_path / "x").exists()


def test_reading_never_imports_torch(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "x", steps=3)
    program = (
        "import sys; from traces import open_trace; t = open_trace(sys.argv[1]); t.raw('gradient', [*t.infos][0], 1);"
        "t.scalars(); t.routing().collect(); list(t.routing_steps(0)); t.verify(); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_file_is_hashed_once_however_often_it_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay walks the trace once per group of parameters, with fewer indexes kept than there are files."""
    write_synthetic(tmp_path / "a", steps=12, chunk_steps=2)
    hashed = []
    monkeypatch.setattr("traces._rank._KEPT_INDEXES", 2)
    original = traces.chunks.sha256_of
    monkeypatch.setattr("traces.chunks.sha256_of", lambda *args: hashed.append(args[2].name) or original(*args))
    trace = open_trace(tmp_path / "a")
    name = next(iter(trace.infos))
    for _ in range(3):
        for step in trace.steps:
            trace.raw("gradient", name, step)
    assert sorted(hashed) == [f"chunk-{number:06d}.safetensors" for number in range(6)]
    chunk = tmp_path / "a" / "rank-00000" / "chunk-000000.safetensors"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\x7f")  # another time, so another file
    with pytest.raises(TraceError, match="damaged"):
        trace.raw("gradient", name, 1)
