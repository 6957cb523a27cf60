"""Flip one byte anywhere: verify finds it, and reading gives one clear line or, at most, nothing that differs."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from traces import TraceError, open_trace
from traces.schema import Header, LayerInfo, RawTensor, StepRecord
from traces.synthetic import write_synthetic
from traces.verify import verify_trace
from traces.views import ParamInfo
from traces.writer import TraceWriter


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mutations") / "m.trace"
    write_synthetic(path, steps=6, chunk_steps=3, num_experts=4, tokens=32, width=4, hidden=4)
    return path


@pytest.fixture(scope="module")
def small_streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics, micro-norms and probes, also of steps of which nothing else was recorded."""
    path = tmp_path_factory.mktemp("mutations") / "s.trace"
    write_small_streams(path)
    return path


def write_small_streams(path: Path, change: dict[tuple[str, str], np.ndarray] | None = None) -> None:
    infos = (
        ParamInfo("up", "routed_expert", (3, 2, 2), layer=0, expert_axis=0, num_experts=3),
        ParamInfo("gate", "router", (3, 2), layer=0),
    )
    header = Header(infos, (LayerInfo(0, "m", 3, 2),), ("statistics", "micro_norms", "probe"))
    with TraceWriter(path, header, chunk_steps=2) as writer:
        for step in range(1, 5):
            tensors = {
                ("statistics", "up"): np.full((8, 3), 2.0),
                ("statistics", "gate"): np.full((8, 1), 1.0),
                ("micro_norms", "up"): np.full((2, 4, 3), 3.0),
                ("probe", "0"): np.array([[0, 1], [2, -1]], np.int8),
            } | (change or {})
            raws = {key: RawTensor(a.dtype.name, a.shape, a) for key, a in tensors.items()}
            writer.append(StepRecord(step, raws, recorded=step % 2 == 1))


@pytest.mark.parametrize(
    ("key", "array", "says"),
    [
        (("statistics", "up"), np.zeros((8, 2)), r"float64 \(8, 2\) is not float64 \[8, 3\]"),
        (("statistics", "up"), np.zeros((8, 3), np.float32), "float32"),
        (("statistics", "up"), np.full((8, 3), -1.0), "values that no gradient gives"),
        (("statistics", "up"), np.full((8, 3), 5.0), "values that no gradient gives"),
        (("statistics", "up"), np.full((8, 3), np.nan), "values that no gradient gives"),
        (("statistics", "down"), np.zeros((8, 3)), "'down' is not in the header"),
        (("micro_norms", "gate"), np.zeros((2, 4, 3)), r"is not float64 \[2, M, 1\]"),
        (("micro_norms", "gate"), np.full((2, 4, 1), 0.5), "values that no gradient gives"),
        (("micro_norms", "gate"), np.zeros(2), r"is not float64 \[2, M, 1\]"),
        (("probe", "0"), np.array([[3, 0]], np.int8), "ids run from 0 to 3, allowed are -1 to 2"),
        (("probe", "0"), np.zeros((2, 3), np.int8), r"is not int8 \[T, K <= 2\]"),
        (("probe", "0"), np.zeros((2, 2), np.int64), "int64"),
        (("probe", "7"), np.zeros((2, 2), np.int8), "is no MoE layer"),
        (("probe", "00"), np.zeros((2, 2), np.int8), "is no MoE layer"),
    ],
)
def test_small_streams_that_cannot_be_are_refused_by_writer_verify_and_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, str], array: np.ndarray, says: str
) -> None:
    with pytest.raises(TraceError, match=says):
        write_small_streams(tmp_path / "a", {key: array})
    with monkeypatch.context() as forged:  # a writer that does not look
        forged.setattr("traces.writer._small.SMALL", ())
        write_small_streams(tmp_path / "b", {key: array})
    damage = [f for f in verify_trace(tmp_path / "b") if f.severity == "damage"]
    assert damage
    trace = open_trace(tmp_path / "b")
    with pytest.raises(TraceError, match=says):
        trace.probe() if key[0] == "probe" else trace.statistics() if key[0] == "statistics" else trace.micro_norms(
            key[1], 1
        )


def flip_and_read(path: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    files = sorted(f for f in path.rglob("*") if f.is_file())
    for _ in range(rounds):
        file = rng.choice(files)
        original = file.read_bytes()
        place = rng.randrange(len(original))
        changed = bytearray(original)
        changed[place] ^= 1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(1, 256)
        file.write_bytes(changed)
        what = f"{file.name} byte {place}: {original[place]} -> {changed[place]}"
        try:
            damage = [f for f in verify_trace(path) if f.severity == "damage"]
            assert damage, what
            assert any(file.name in f.message for f in damage), (what, damage)
            with pytest.raises(TraceError) as error:
                read(path)
            assert file.name in str(error.value), what
            assert "\n" not in str(error.value), what
        finally:
            file.write_bytes(original)
    assert verify_trace(path) == []


def read(path: Path) -> None:
    trace = open_trace(path)
    for step in trace.all_steps:
        for name in trace.infos:
            trace.raw("gradient", name, step)
            trace.raw("weight", name, step)
    trace.routing().collect()
    if "probe" in trace.streams:
        for step in trace.probe_steps():
            trace.probe_step(step, 0)
            trace.micro_norms("up", step)
            trace.raw("statistics", "up", step)


def test_every_flip_is_found(copy: Path) -> None:
    flip_and_read(copy, 500, seed=20)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_flip_is_found_at_length(copy: Path) -> None:
    flip_and_read(copy, 10_000, seed=21)


def test_every_cut_of_every_small_file_is_found(copy: Path, tmp_path: Path) -> None:
    broken = tmp_path / "c.trace"
    shutil.copytree(copy, broken)
    for file in sorted(f for f in broken.rglob("*") if f.is_file()):
        original = file.read_bytes()
        for size in sorted({0, 1, 7, 8, 9, 77, 78, 79, len(original) // 2, len(original) - 1}):
            if size < len(original):
                file.write_bytes(original[:size])
                with pytest.raises(TraceError, match=file.name):
                    read(broken)
        file.write_bytes(original)


def test_every_flip_in_the_small_streams_is_found(small_streams: Path) -> None:
    flip_and_read(small_streams, 100, seed=22)
