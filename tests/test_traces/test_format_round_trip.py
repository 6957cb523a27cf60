"""What is written comes back bit for bit, for any shapes, dtypes, subsets and scalars."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from traces import open_trace
from traces._torch import from_torch, to_torch
from traces.chunks import ChunkFile, raw_from_array, write_chunk
from traces.errors import TraceError
from traces.reader import Trace
from traces.schema import DTYPES, Header, LayerInfo, RawTensor, RoutingRecord, StepRecord
from traces.views import ParamInfo
from traces.writer import TraceWriter

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | TEXT
SCALARS = st.dictionaries(TEXT, st.recursive(LEAVES, lambda x: st.lists(x, max_size=3), max_leaves=4), max_size=4)


def same(a: object, b: object) -> bool:
    """Equal, NaN being equal to itself and True not to 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isnan(a) == math.isnan(b) and (
            math.isnan(a) or (a == b and math.copysign(1, a) == math.copysign(1, b))
        )
    return type(a) is type(b) and a == b


@st.composite
def recordings(draw: st.DrawFn) -> tuple[Header, list[StepRecord], dict[str, int]]:
    """A header, step records that fit it, and chunk limits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts = draw(st.integers(1, 5))
    top_k = draw(st.integers(1, experts))
    dtypes = st.sampled_from(sorted(DTYPES))
    infos = []
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        axis = draw(st.none() | st.integers(0, len(shape)))
        shape = shape if axis is None else (*shape[:axis], experts, *shape[axis:])
        infos.append(
            ParamInfo(
                f"layer.{i}/w",
                "routed_expert",
                shape,
                draw(dtypes),
                expert_axis=axis,
                num_experts=None if axis is None else experts,
            )
        )
    layers = tuple(LayerInfo(n, f"m{n}", experts, max(1, top_k - n)) for n in range(draw(st.integers(0, 2))))
    records, step = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 6))):
        step += draw(st.integers(1, 3))
        record = StepRecord(step, scalars=draw(SCALARS), recorded=draw(st.booleans()))
        for info in infos if record.recorded else ():
            shape = info.shape
            if info.expert_axis is not None and draw(st.booleans()):
                ids = np.flatnonzero(rng.random(experts) < 0.5)
                record.experts[info.name] = ids
                shape = (*shape[: info.expert_axis], len(ids), *shape[info.expert_axis + 1 :])
            for stream in draw(st.sets(st.sampled_from(["gradient", "weight", "grad_buffer", "state.exp_avg"]))):
                record.tensors[stream, info.name] = bits(rng, draw(dtypes), shape)
            width = () if info.expert_axis is None else (experts,)
            record.presence[info.name] = rng.integers(2, 4, width).astype(np.uint8).reshape(width)
        for layer in layers if record.recorded else ():
            for micro in range(draw(st.integers(0, 2))):
                tokens = draw(st.integers(0, 9))
                ids = rng.integers(-1, experts, (tokens, layer.top_k)).astype(
                    draw(st.sampled_from([np.int8, np.int32, np.int64]))
                )
                record.routing.append(RoutingRecord(layer.layer, micro, ids, rng.random(tokens) < 0.3))
        records.append(record)
    limits = {"chunk_bytes": draw(st.sampled_from([1, 200, 1 << 20])), "chunk_steps": draw(st.integers(1, 4))}
    return Header(params=tuple(infos), layers=layers), records, limits


def bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> RawTensor:
    stored = DTYPES[dtype][1]
    if dtype == "bool":
        return RawTensor(dtype, shape, rng.random(shape) < 0.5)
    raw = rng.integers(0, 256, (math.prod(shape), stored.itemsize), dtype=np.uint8)  # NaN, infinities and denormals too
    return RawTensor(dtype, shape, raw.reshape(-1).view(stored).reshape(shape))


@given(recordings())
def test_everything_comes_back(recording: tuple[Header, list[StepRecord], dict[str, int]]) -> None:
    header, records, limits = recording
    with tempfile.TemporaryDirectory() as folder:
        with TraceWriter(Path(folder) / "x.trace", header, **limits) as writer:
            for record in records:
                writer.append(record)
        trace = open_trace(Path(folder) / "x.trace")
        assert trace.verify() == []
        assert trace.finished
        assert trace.header.params == header.params
        assert trace.all_steps == [r.step for r in records]
        assert trace.steps == [r.step for r in records if r.recorded]
        for record in records:
            check_step(trace, record)
        assert trace.scalars().height == len(records)
        rows = sum(len(x.is_pad) for r in records for x in r.routing)
        assert trace.routing().collect().height == rows


def check_step(trace: Trace, record: StepRecord) -> None:
    stored = trace._record(record.step).scalars
    assert list(stored) == list(record.scalars)
    assert all(same(stored[k], v) for k, v in record.scalars.items())
    for (stream, name), tensor in record.tensors.items():
        back = trace.raw(stream, name, record.step)
        assert back is not None
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert back.data.tobytes() == tensor.data.tobytes()
    for name, codes in record.presence.items():
        assert (trace.presence(name, record.step) == codes).all()
        ids = trace.experts(name, record.step)
        assert (ids is None) == (name not in record.experts)
        assert ids is None or (ids == record.experts[name]).all()
    for layer in trace.layers:
        mine = sorted((x for x in record.routing if x.layer == layer.layer), key=lambda x: x.micro_step)
        step = trace.routing_step(record.step, layer.layer)
        assert (step is None) == (not mine)
        if step is not None:
            assert (step.topk_expert_ids == np.concatenate([x.topk_expert_ids for x in mine])).all()
            assert (step.is_pad == np.concatenate([x.is_pad for x in mine])).all()
            kept = step.topk_expert_ids[~step.is_pad]
            assert step.tokens_per_expert.tolist() == [int((kept == e).sum()) for e in range(layer.num_experts)]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if not d.startswith(("uint16", "uint32", "uint64"))])
def test_torch_bits(dtype: str) -> None:
    tensor = torch.tensor([[0.0, 1.0, -2.0], [0.5, 3.0, 7.0]]).to(getattr(torch, dtype)).T
    raw = from_torch(tensor)
    assert raw.dtype == dtype
    assert raw.data.flags.c_contiguous
    assert torch.equal(to_torch(raw).view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_other_tools_read_a_chunk(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(3, dtype=np.int8),
        "b": np.arange(6, dtype=np.float64).reshape(2, 3),
        "c": np.float32(1).reshape(()),
    }
    write_chunk(tmp_path / "chunk.safetensors", [((7, "gradient", k), raw_from_array(v)) for k, v in arrays.items()])
    loaded = load_file(tmp_path / "chunk.safetensors")
    for name, array in arrays.items():
        assert np.array_equal(loaded[f"7/gradient/{name}"], array)
        assert loaded[f"7/gradient/{name}"].shape == array.shape


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    mixed = [
        ((1, "s", str(i)), raw_from_array(np.ones(3, t)))
        for i, t in enumerate([np.int8, np.float64, np.float16, np.float32])
    ]
    entry = write_chunk(tmp_path / "chunk-000000.safetensors", mixed)
    index = ChunkFile(tmp_path / "chunk-000000.safetensors", entry, (1, 1)).index()
    assert all(slot.start % DTYPES[slot.dtype][1].itemsize == 0 for slot in index.values())


def test_the_worked_example_is_what_the_writer_writes(tmp_path: Path) -> None:
    """FORMAT.md shows real bytes."""
    info = ParamInfo(
        "experts.up", "routed_expert", (2, 1, 1), layer=0, expert_axis=0, num_experts=2, matrix_axes=(1, 2)
    )
    run = {"optimizer": "torch.optim.sgd.SGD", "groups": [{"params": ["experts.up"]}]}
    header = Header(params=(info,), layers=(LayerInfo(0, "experts", 2, 1),), run=run)
    gradient = RawTensor("float32", (2, 1, 1), np.array([[[0.5]], [[0.0]]], np.float32))
    presence = {"experts.up": np.array([3, 2], np.uint8)}
    with TraceWriter(tmp_path / "e.trace", header) as writer:
        scalars = {"loss": float("nan"), "lr": [0.1]}
        writer.append(StepRecord(1, {("gradient", "experts.up"): gradient}, presence, scalars=scalars))
    page = (Path(__file__).parents[2] / "traces" / "FORMAT.md").read_text()
    shown = re.findall(r"```(?:json)?\n(.*?)```", page, re.DOTALL)
    folder = tmp_path / "e.trace" / "rank-00000"
    assert (folder / "seal-000000.json").read_text() in shown
    assert (folder / "end.json").read_text() in shown
    assert json.loads(shown[-2])["seals"] == 1
    raw = (folder / "chunk-000000.safetensors").read_bytes()
    head, table, data = raw[:8], raw[8:-8], raw[-8:]
    assert f"{head.hex(' ')}\n{table.decode()}|\n{data.hex(' ')}\n" in shown


def test_numpy_numbers_that_are_not_finite_come_back(tmp_path: Path) -> None:
    """numpy's float64 is a float whose repr is not one."""
    header = Header(params=(), provenance={"best": np.float64("inf")})
    with TraceWriter(tmp_path / "a", header) as writer:
        writer.append(StepRecord(1, scalars={"loss": np.float64("nan"), "norm": np.float32("-inf")}))
    trace = open_trace(tmp_path / "a")
    assert trace.header.provenance == {"best": math.inf}
    assert trace.scalars()["nonfinite"].to_list() == ["loss=nan, norm=-inf"]


@pytest.mark.parametrize(
    "scalars",
    [{"note": "\ud800"}, {"\ud800": 1}, {"n" * 513: 1}, {"note": "x" * 70_000}, {"many": ["y" * 60_000] * 80}],
    ids=["surrogate", "surrogate name", "long name", "long text", "much text"],
)
def test_what_no_reader_would_take_is_refused_and_leaves_the_writer_sound(tmp_path: Path, scalars: dict) -> None:
    with TraceWriter(tmp_path / "a", Header(), chunk_steps=1) as writer:
        writer.append(StepRecord(1, scalars={"loss": 1.0}))
        with pytest.raises(TraceError, match="step 2"):
            writer.append(StepRecord(2, scalars=scalars))
        writer.append(StepRecord(2, scalars={"loss": 2.0}))
    assert open_trace(tmp_path / "a").scalars()["loss"].to_list() == [1.0, 2.0]
