"""A writer that dies, or whose disk is full, loses nothing that was sealed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from traces import TraceError, open_trace
from traces import _files as files
from traces.recover import recover
from traces.schema import Header, LayerInfo, RawTensor, RoutingRecord, StepRecord
from traces.views import ParamInfo
from traces.writer import TraceWriter

# A writer says `sealed N` only after the seal of step N is on disk, so whatever it said must be readable. Each one is
# forked from a process that has imported everything already, and runs until it is killed.
WRITERS = """
import os, sys
import numpy as np
import pyarrow.parquet
from traces.schema import Header, LayerInfo, RawTensor, RoutingRecord, StepRecord
from traces.views import ParamInfo
from traces.writer import TraceWriter

def write(path):
    print("pid", os.getpid(), flush=True)
    header = Header(params=(ParamInfo("w", "router", (64, 64)),), layers=(LayerInfo(0, "m", 4, 2),))
    writer = TraceWriter(path, header, chunk_steps=2)
    for step in range(1, 1000000):
        data = np.full((64, 64), step, np.float32)
        routing = RoutingRecord(0, 0, np.full((50, 2), step % 4), np.zeros(50, bool))
        writer.append(StepRecord(step, {("gradient", "w"): RawTensor("float32", data.shape, data)}, routing=[routing]))
        if writer.sealed_steps == step:
            print("sealed", step, flush=True)

for path in sys.argv[1:]:
    if os.fork() == 0:
        write(path)
    os.wait()
    print("dead", 0, flush=True)
"""


def check(path: Path, said: int) -> None:
    """Everything the writer said it had sealed reads back right, before and after recovery; nothing is deleted."""
    if said == 0 and not (path / "rank-00000" / "header.json").exists():  # killed before there was a trace
        with pytest.raises(TraceError):
            open_trace(path)
        return
    trace = open_trace(path)
    steps = trace.steps
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= said
    for step in steps[-6:]:
        raw = trace.raw("gradient", "w", step)
        assert raw is not None
        assert (raw.data == step).all()
        routing = trace.routing_step(step, 0)
        assert routing is not None
        assert (routing.topk_expert_ids == step % 4).all()
    assert not [f for f in trace.verify() if f.severity == "damage"]
    before = sum(f.is_file() for f in path.rglob("*"))
    assert recover(path).steps == steps
    again = open_trace(path)
    assert again.finished
    assert again.steps == steps
    assert again.verify() == []
    assert sum(f.is_file() for f in path.rglob("*")) == before + 1  # end.json


def kill_at_random(folder: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    paths = [folder / f"{number}.trace" for number in range(rounds)]
    command = [sys.executable, "-c", WRITERS, *map(str, paths)]
    reached = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdout is not None
        for path in paths:
            said, wanted = 0, 2 * rng.randrange(6)
            pid = int(writers.stdout.readline().removeprefix("pid"))
            while said < wanted:
                said = int(writers.stdout.readline().removeprefix("sealed"))
            time.sleep(rng.random() * 0.02)  # a seal takes a few milliseconds, so this ends anywhere within one
            os.kill(pid, signal.SIGKILL)
            while not (line := writers.stdout.readline()).startswith("dead"):
                said = int(line.removeprefix("sealed"))
            check(path, said)
            reached.append(said)
            shutil.rmtree(path, ignore_errors=True)
    assert len({*reached}) > 2


def test_twenty_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 20, seed=1)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_two_hundred_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 200, seed=2)


# ---- every byte: the file system stops obeying after N bytes or N calls, as a kill or a full disk would make it

INFO = ParamInfo("w", "router", (8, 8))
HEADER = Header(params=(INFO,), layers=(LayerInfo(0, "m", 4, 2),))


def record(step: int) -> StepRecord:
    data = np.full((8, 8), step, np.float32)
    routing = RoutingRecord(0, 0, np.full((50, 2), step % 4), np.zeros(50, bool))
    return StepRecord(step, {("gradient", "w"): RawTensor("float32", data.shape, data)}, routing=[routing])


class FullDisk:
    """Stands in for `os` inside the writer: after `room` bytes every write fails, half-done, until `freed` is set."""

    def __init__(self, room: int, calls: int = 1 << 30) -> None:
        self.room, self.calls, self.freed = room, calls, False

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self.freed and self.room < len(data):
            part, self.room = self.room, 0
            if part:
                return os.write(descriptor, data[:part])
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(data)
        return os.write(descriptor, data)

    def _counted(self, call: Callable[..., None], *arguments: object) -> None:
        self.calls -= 1
        if self.calls < 0 and not self.freed:
            raise OSError(errno.EIO, "Input/output error")
        call(*arguments)

    def fsync(self, descriptor: int) -> None:
        self._counted(os.fsync, descriptor)

    def replace(self, source: Path, target: Path) -> None:
        self._counted(os.replace, source, target)


def record_on(disk: FullDisk, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], TraceWriter | None]:
    """Append steps 1 to 12; return those that `append` took without an error."""
    taken: list[int] = []
    monkeypatch.setattr(files, "os", disk)
    try:
        writer = TraceWriter(path, HEADER, chunk_steps=2)
    except OSError:
        return taken, None
    for step in range(1, 13):
        try:
            writer.append(record(step))
        except OSError:
            continue
        taken.append(step)
    return taken, writer


def total_bytes(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def fill_at(places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk fill at about `places` byte counts, spread over everything a writer writes."""
    with TraceWriter(tmp_path / "whole", HEADER, chunk_steps=2) as writer:
        for step in range(1, 13):
            writer.append(record(step))
    size = total_bytes(tmp_path / "whole")
    for room in np.linspace(0, size, places).astype(int).tolist():
        path = tmp_path / "x.trace"
        taken, broken = record_on(FullDisk(room), path, monkeypatch)
        monkeypatch.undo()
        if broken is None:
            with pytest.raises(TraceError):
                open_trace(path)
        else:
            sealed = broken.sealed_steps
            trace = open_trace(path)
            assert trace.steps == list(range(1, sealed + 1)) == taken[:sealed]
            assert not [f for f in trace.verify() if f.severity == "damage"]
            assert not list(path.rglob(".*.tmp"))  # a full disk is not filled further by leftovers
            broken.close(discard=True)
            assert open_trace(path).lost_steps == broken.lost_steps == len(taken) - sealed
        shutil.rmtree(path)


def test_a_disk_that_fills_at_any_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_at(60, tmp_path, monkeypatch)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_disk_that_fills_at_every_third_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_at(5000, tmp_path, monkeypatch)


def test_the_loss_is_exact_when_room_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(4000)
    taken, writer = record_on(disk, tmp_path / "x", monkeypatch)
    assert writer is not None
    assert 0 < writer.sealed_steps < len(taken) < 12
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    disk.freed = True
    writer.append(record(13))
    writer.close()
    monkeypatch.undo()
    assert open_trace(tmp_path / "x").steps == [*taken, 13]
    assert open_trace(tmp_path / "x").verify() == []


def test_a_call_that_fails_at_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync and rename fail from the n-th call on: the seals that were renamed count, and only they."""
    for calls in range(0, 60, 2):
        path = tmp_path / f"{calls}.trace"
        _, writer = record_on(FullDisk(1 << 30, calls), path, monkeypatch)
        monkeypatch.undo()
        if writer is None:
            continue
        steps = open_trace(path).steps
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= writer.sealed_steps
        assert not [f for f in open_trace(path).verify() if f.severity == "damage"]
