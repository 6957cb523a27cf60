"""Size: tensors within 1.01 of their raw bytes, routing within 1.3 of its entropy, and what writing costs."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

from traces import open_trace
from traces.routing import write_routing
from traces.schema import Header, LayerInfo, RawTensor, RoutingRecord, StepRecord
from traces.synthetic import route, write_synthetic
from traces.views import ParamInfo
from traces.writer import TraceWriter


def entropy_bytes(ids: np.ndarray) -> float:
    """Bytes an ideal coder of single ids would need for one column."""
    _, counts = np.unique(ids, return_counts=True)
    share = counts / counts.sum()
    return float(-(share * np.log2(share)).sum() * len(ids) / 8)


def test_a_realistic_trace_is_as_small_as_promised(tmp_path: Path) -> None:
    write_synthetic(
        tmp_path / "x",
        steps=24,
        layers=4,
        tokens=1024,
        width=64,
        hidden=128,
        zipf=0.7,
        repeat_probability=0.0,
        padding=0.1,
    )
    trace = open_trace(tmp_path / "x")
    total = sum(f.stat().st_size for f in (tmp_path / "x").rglob("*") if f.is_file())
    routing = sum(f.stat().st_size for f in (tmp_path / "x").rglob("routing-*"))
    tensors = sum(p.numel * 4 for p in trace.header.params) * (len(trace.steps) + len(trace.weight_steps()))
    assert (total - routing) / tensors <= 1.01
    columns = [np.concatenate([s.topk_expert_ids for s in trace.routing_steps(x.layer)]) for x in trace.layers]
    ideal = sum(entropy_bytes(column[:, k]) for column in columns for k in range(2))
    assert routing / ideal <= 1.3


@pytest.mark.parametrize(
    ("experts", "top_k", "layers", "tokens", "steps", "micro_steps", "zipf"),
    [
        (8, 2, 4, 1024, 8, 1, 0.3),
        (8, 2, 4, 512, 4, 4, 1.0),
        (64, 8, 8, 1024, 2, 1, 1.0),
        (128, 8, 2, 2048, 2, 1, 0.5),
        (256, 8, 2, 2048, 2, 1, 1.0),
    ],
)
def test_routing_of_common_models(
    tmp_path: Path, experts: int, top_k: int, layers: int, tokens: int, steps: int, micro_steps: int, zipf: float
) -> None:
    rng = np.random.default_rng(1)
    infos = [LayerInfo(n, "m", experts, top_k) for n in range(layers)]
    rows, ideal = [], 0.0
    for layer in range(layers):
        popularity = (rng.permutation(experts) + 1.0) ** -zipf
        ids = [route(rng, popularity, tokens, top_k, 0.0) for _ in range(steps * micro_steps)]
        pad = np.arange(tokens) >= tokens * 0.9
        rows += [(1 + i // micro_steps, RoutingRecord(layer, i % micro_steps, x, pad)) for i, x in enumerate(ids)]
        ideal += sum(entropy_bytes(np.concatenate(ids)[:, k]) for k in range(top_k))
    assert write_routing(tmp_path / "routing-000000.parquet", rows, infos).bytes / ideal <= 1.3


def test_writing_costs_little_more_than_hashing_and_storing(tmp_path: Path) -> None:
    """CPU time of the writer's thread against one sha256 and one write of the same bytes, as paired ratios."""
    info = ParamInfo("w", "router", (1 << 21,))
    data = np.random.default_rng(0).standard_normal(1 << 21, np.float32)
    ratios = []
    for attempt in range(7):
        start = time.thread_time()
        with TraceWriter(tmp_path / f"{attempt}.trace", Header(params=(info,))) as writer:
            for step in range(4):
                writer.append(StepRecord(step, {("gradient", "w"): RawTensor("float32", data.shape, data)}))
        ours = time.thread_time() - start
        start = time.thread_time()
        with open(tmp_path / f"{attempt}.plain", "wb", buffering=0) as file:
            for _ in range(4):
                hashlib.sha256(data).digest()
                file.write(data.data)
            os.fsync(file.fileno())
        ratios.append(ours / (time.thread_time() - start))
    assert np.median(ratios) < 1.4, ratios
