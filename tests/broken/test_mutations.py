"""Flip one byte anywhere: verify finds it, and reading gives one clear line or, at most, nothing that differs."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from traces import TraceError, open_trace
from traces.synthetic import write_synthetic
from traces.verify import verify_trace


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mutations") / "m.trace"
    write_synthetic(path, steps=6, chunk_steps=3, num_experts=4, tokens=32, width=4, hidden=4)
    return path


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
