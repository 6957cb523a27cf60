"""A trace followed while another process writes it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from traces import GradreelError, open_trace
from traces.follow import follow

# Writes a step whenever a line comes in, so that the test sets the pace; ends the trace when the lines end.
WRITER = """
import sys
import numpy as np
from traces.schema import Header, RawTensor, StepRecord
from traces.views import ParamInfo
from traces.writer import TraceWriter

writer = TraceWriter(sys.argv[1], Header(params=(ParamInfo("w", "router", (64, 64)),)), chunk_steps=1)
print("open", flush=True)
for number, _ in enumerate(sys.stdin, 1):
    data = np.full((64, 64), number, np.float32)
    tensors = {("gradient", "w"): RawTensor("float32", data.shape, data)}
    writer.append(StepRecord(number, tensors, scalars={"loss": 2.5}))
    print(number, flush=True)
writer.close()
"""


class Writer:
    """A second process that writes one step at a time."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-c", WRITER, str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline() == "open\n"

    def steps(self, count: int) -> None:
        assert self.process.stdin
        assert self.process.stdout
        for _ in range(count):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            self.process.stdout.readline()

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()


def test_steps_show_as_they_are_sealed_until_the_end(tmp_path: Path) -> None:
    path, lines, notes = tmp_path / "a.trace", [], []
    writer: list[Writer] = []

    def sleep(seconds: float) -> None:
        """Between two looks the writer gets on: it begins, writes two steps, then three, then ends."""
        looks = len(notes) + len(lines)
        if not writer:
            writer.append(Writer(path))
        elif looks == 1:
            writer[0].steps(2)
        elif looks == 2:
            writer[0].steps(3)
        else:
            writer[0].close()

    trace = follow(path, lines.append, every=0.01, note=notes.append, sleep=sleep)
    assert trace is not None
    assert trace.finished
    assert trace.steps == [1, 2, 3, 4, 5]
    assert notes == [f"waiting for {path} to begin"]
    assert len(lines) == 3
    assert "steps 1 to 2 " in lines[0]
    assert "steps 3 to 5 " in lines[1]
    assert all("loss 2.5 " in line and len(line) <= 80 for line in lines[:2])
    assert "+48.4 KiB, 80.6 KiB in all" in lines[1]
    assert lines[2] == "finished: 5 steps, 80.6 KiB"


def test_a_writer_that_is_killed_ends_it(tmp_path: Path) -> None:
    path, lines = tmp_path / "k.trace", []
    writer = Writer(path)
    writer.steps(2)
    assert follow(path, lines.append, every=0.01, sleep=lambda _: writer.kill()) is None
    assert "steps 1 to 2 " in lines[0]
    assert lines[1].startswith("the writer is gone, and has not ended the trace: 2 steps, ")
    assert open_trace(path).steps == [1, 2]


def test_control_c_ends_it_with_0(tmp_path: Path) -> None:
    path = tmp_path / "c.trace"
    writer = Writer(path)
    writer.steps(1)
    # A job in the background inherits that SIGINT is ignored; a terminal's has Python's own handler.
    handler = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{handler}; from ablations.cli import main; main()"
    command = [sys.executable, "-c", program, "info", "--follow", str(path), "--every", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout
        assert watcher.stderr
        assert "step 1 " in watcher.stdout.readline()
        writer.steps(1)
        assert "step 2 " in watcher.stdout.readline()
        watcher.send_signal(signal.SIGINT)
        try:
            assert watcher.wait(60) == 0
        finally:
            watcher.kill()
        assert watcher.stderr.read() == ""
    writer.close()


def test_what_cannot_be_followed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GradreelError, match="no number of seconds"):
        follow(tmp_path, print, every=0)
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(GradreelError, match="is a file"):
        follow(file, print)
    broken = tmp_path / "b.trace"
    broken.mkdir()
    (broken / "header.json").write_text("{}")
    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(GradreelError, match=r"header\.json does not end in its own hash"):
        follow(broken, print, sleep=lambda _: None)


def test_a_seal_that_breaks_while_it_is_followed(tmp_path: Path) -> None:
    path, shown = tmp_path / "s.trace", []
    writer = Writer(path)
    writer.steps(1)
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        (path / "rank-00000" / "seal-000001.json").write_text("{}")

    with pytest.raises(GradreelError, match="seal-000001"):
        follow(path, shown.append, sleep=sleep)
    assert looks == 5
    assert len(shown) == 1
    writer.kill()


def test_a_look_sees_whole_seals_only(tmp_path: Path) -> None:
    """Opened a hundred times while it is written, a trace always is the first steps, complete."""
    path: Any = tmp_path / "w.trace"
    writer = Writer(path)
    assert writer.process.stdin
    writer.process.stdin.write("\n" * 150)
    writer.process.stdin.flush()
    seen: set[int] = set()
    trace = open_trace(path)
    while len(trace.steps) < 150:
        trace.refresh()
        fresh = open_trace(path)
        for each in (trace, fresh):
            assert each.steps == list(range(1, len(each.steps) + 1))
            if each.steps:
                assert (each.raw("gradient", "w", each.steps[-1]).data == each.steps[-1]).all()
        seen.add(len(trace.steps))
    writer.close()
    assert len(seen) > 1
    assert trace.refresh()
    assert trace.finished
