"""Budgets, full queues, full disks: what is lost is counted, and training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import traces.writer
from traces.errors import GradreelError, TraceError
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder

DOWN = "layers.1.experts.down_proj"


def steps(model: Any, optimizer: Any, batches: Any, parts: Any, count: int) -> None:
    for step in range(count):
        parts.loss(model, batches[step % len(batches)]).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_budget_ends_the_recording_not_the_training(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = RecordAt(budget="40KiB")
    weights = {}
    with Recorder(tmp_path / "a", model, optimizer, at=at, notify=notes.append) as reel:
        for step in range(1, 31):
            weights[step] = model.layers[1].experts.down_proj.detach().clone()
            steps(model, optimizer, batches, parts, 1)
    trace = open_trace(tmp_path / "a")
    last = trace.steps[-1]
    assert trace.finished
    assert 3 < last < 30
    assert reel.recorded_steps == last
    assert torch.equal(trace.weight(DOWN, last + 1), weights[last + 1])
    assert sum(file.stat().st_size for file in (tmp_path / "a").rglob("*.safetensors")) <= 40 << 10
    assert sum("budget of 40.0 KiB is reached" in note for note in notes) == 1


def test_a_budget_without_room_for_one_step_of_routing(tmp_path: Path, make_model, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randint(0, 16, (16, 256))
    with pytest.raises(GradreelError, match=r"budget '12KiB' is too small"):  # noqa: SIM117
        with Recorder(tmp_path / "a", model, optimizer, at=RecordAt(budget="12KiB"), notify=notes.append):
            steps(model, optimizer, [batch], parts, 1)
    assert not (tmp_path / "a").exists()


class SlowWriter(traces.writer.TraceWriter):
    """Takes a step only when the test lets it."""

    gate = threading.Event()

    def append(self, record: Any) -> None:
        self.gate.wait(30)
        super().append(record)


def test_a_full_queue_drops_and_counts(tmp_path: Path, make_model, batches, parts, notes, monkeypatch) -> None:
    monkeypatch.setattr("traces.sink.TraceWriter", SlowWriter)
    SlowWriter.gate.clear()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, when_full="drop", queue_steps=2, notify=notes.append) as reel:
        steps(model, optimizer, batches, parts, 6)
        SlowWriter.gate.set()
    trace = open_trace(tmp_path / "a")
    assert reel.dropped_steps == 4
    assert trace.steps == [1, 2]
    assert trace.scalars()["dropped"].to_list()[:6] == [None, None, True, True, True, True]
    assert any("4 steps were dropped" in note for note in notes)


def test_a_full_queue_blocks_by_default(tmp_path: Path, make_model, batches, parts, notes, monkeypatch) -> None:
    monkeypatch.setattr("traces.sink.TraceWriter", SlowWriter)
    SlowWriter.gate.clear()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    threading.Timer(0.3, SlowWriter.gate.set).start()
    with Recorder(tmp_path / "a", model, optimizer, queue_steps=1, notify=notes.append) as reel:
        steps(model, optimizer, batches, parts, 6)
    assert reel.dropped_steps == 0
    assert open_trace(tmp_path / "a").steps == [1, 2, 3, 4, 5, 6]


class FullDisk(traces.writer.TraceWriter):
    """Fails like a full disk from the third flush on, as long as `full` says."""

    full = True
    flushes = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, chunk_bytes=1, **options)

    def flush(self) -> None:
        if self._buffer:
            self.flushes += 1
            if self.full and self.flushes > 2:
                raise OSError(28, "No space left on device")
        super().flush()


@pytest.mark.parametrize("freed", [False, True])
def test_a_full_disk(tmp_path: Path, make_model, batches, parts, notes, monkeypatch, freed: bool) -> None:
    """Fault 20: training goes on, sealed steps are readable, what was lost is counted and told."""
    monkeypatch.setattr("traces.sink.TraceWriter", FullDisk)
    monkeypatch.setattr(FullDisk, "full", True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append) as reel:
        steps(model, optimizer, batches, parts, 6)
        reel.flush()
        monkeypatch.setattr(FullDisk, "full", not freed)
    trace = open_trace(tmp_path / "a")
    told = next(note for note in notes if "could not be written" in note)
    assert "No space left on device" in told
    if freed:
        assert trace.steps == [1, 2]
        assert trace.lost_steps == reel.lost_steps == 4
        assert trace.finished
        assert trace.weight(DOWN, 7) is not None
    else:
        assert trace.steps == [1, 2]
        assert reel.lost_steps == 5  # four steps and the closing snapshot
    assert [finding for finding in trace.verify() if finding.severity != "note"] == []


def test_strict_raises_in_the_loop(tmp_path: Path, make_model, batches, parts, notes, monkeypatch) -> None:
    monkeypatch.setattr("traces.sink.TraceWriter", FullDisk)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = []

    def loop() -> None:
        with Recorder(tmp_path / "a", model, optimizer, strict=True, notify=notes.append) as reel:
            for step in range(6):
                steps(model, optimizer, batches, parts, 1)
                reel.flush()
                done.append(step)

    with pytest.raises(GradreelError, match=r"No space left on device.*strict=True"):
        loop()
    assert len(done) == 3


def test_buffers_are_used_again(tmp_path: Path, make_model, batches, parts, notes, monkeypatch) -> None:
    """Memory stays at the queue's size once the writer keeps up, however long the run is."""
    original = traces.writer.TraceWriter

    class SmallChunks(original):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, chunk_bytes=1, **options)

    monkeypatch.setattr("traces.sink.TraceWriter", SmallChunks)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, queue_steps=1, notify=notes.append) as reel:
        steps(model, optimizer, batches, parts, 3)
        reel.flush()
        early = reel.buffer_bytes
        for _ in range(10):
            steps(model, optimizer, batches, parts, 1)
            reel.flush()
        assert reel.buffer_bytes == early
    one_step = sum(p.numel() * 4 for p in model.layers[1].parameters())
    assert reel.buffer_bytes <= 5 * one_step


def test_an_exception_of_the_loop_comes_out_and_the_trace_is_whole(
    tmp_path: Path, make_model, batches, parts, notes
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def interrupted() -> None:
        with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
            steps(model, optimizer, batches, parts, 3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    trace = open_trace(tmp_path / "a")
    assert trace.finished
    assert trace.steps == [1, 2, 3]


class Picky(traces.writer.TraceWriter):
    """Refuses one record, as it would one that does not fit the header."""

    def append(self, record: Any) -> None:
        if record.step == 2:
            raise TraceError("step 2 does not fit")
        super().append(record)


def test_a_step_that_does_not_fit_costs_no_other(
    tmp_path: Path, make_model, batches, parts, notes, monkeypatch
) -> None:
    """Only the disk makes the recorder pause; what is wrong with one record says nothing about the next."""
    monkeypatch.setattr("traces.sink.TraceWriter", Picky)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append) as reel:
        steps(model, optimizer, batches, parts, 4)
    trace = open_trace(tmp_path / "a")
    assert trace.steps == [1, 3, 4]
    assert reel.lost_steps == trace.lost_steps == 1
    assert any("1 of 5 steps could not be written" in note and "step 2 does not fit" in note for note in notes)


def test_what_fails_before_the_writer_is_counted_too(
    tmp_path: Path, make_model, batches, parts, notes, monkeypatch
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append) as reel:
        steps(model, optimizer, batches, parts, 2)
        reel.flush()
        monkeypatch.setattr("traces.records.presence_codes", lambda *args: 1 / 0)
        steps(model, optimizer, batches, parts, 2)
    assert reel.lost_steps == 2
    assert any("ZeroDivisionError" in note for note in notes)
    assert open_trace(tmp_path / "a").steps == [1, 2]


def test_ids_of_no_expert_are_refused_before_training(tmp_path: Path, make_model, parts) -> None:
    with pytest.raises(GradreelError, match=r"experts names id 99, the layer has experts 0 to 4"):
        Recorder(tmp_path / "a", make_model(), at=RecordAt(experts=(0, 99)))


def test_a_model_on_two_devices_is_refused(tmp_path: Path, make_model) -> None:
    model = make_model()
    model.layers[1].router.to("meta")
    with pytest.raises(GradreelError, match=r"lie on cpu, meta"):
        Recorder(tmp_path / "a", model)
