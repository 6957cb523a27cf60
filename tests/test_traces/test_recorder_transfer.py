"""Copies, queues and presence codes; the CUDA transfer against a fake that keeps its order of events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import traces.spool
from traces.errors import GradreelError
from traces.reader import open_trace
from traces.recorder import Recorder
from traces.records import total_norm
from traces.spool import BufferPool, CpuTransfer, CudaTransfer, Spool, presence_codes, raw_tensor, transfer_for
from traces.views import NONZERO, ZERO

DOWN = "layers.1.experts.down_proj"


def test_cuda_copies_go_over_the_side_stream_and_nobody_waits(fake: Any) -> None:
    transfer = CudaTransfer(torch.device("cpu"), cuda=fake, pinned=False)
    source = torch.randn(3, 4).t()
    transfer.begin(source.numel() * 4)
    copied = transfer.copy(source)
    halved = transfer.copy(source, torch.bfloat16, torch.tensor(2.0))
    small = transfer.small(torch.arange(3))
    wait = transfer.end()
    source.zero_()  # what the optimizer does to its gradient afterwards
    assert copied.shape == (4, 3)
    assert copied.is_contiguous()
    assert copied.abs().sum() > 0
    torch.testing.assert_close(halved.float(), copied / 2, rtol=0.01, atol=0)
    assert small.tolist() == [0, 1, 2]
    said = [what for what, _ in fake.log]
    assert "host waits" not in said
    assert said.count("side waits for main") == 3
    assert said[-1] == "event after side"
    wait()
    assert fake.log[-1][0] == "host waits"


def test_cuda_gradients_too_large_to_stage_hold_the_main_stream(fake: Any, monkeypatch) -> None:
    monkeypatch.setattr(traces.spool, "STAGE_BYTES", 4)
    transfer = CudaTransfer(torch.device("cpu"), cuda=fake, pinned=False)
    transfer.begin(100)
    transfer.copy(torch.ones(5))
    transfer.end()
    assert fake.log[-1][0] == "main waits for event"  # on the device: the optimizer may not write before the copy


def test_cuda_path_end_to_end_with_a_fake(tmp_path: Path, make_model, batches, parts, notes, fake, monkeypatch) -> None:
    monkeypatch.setattr("traces.recorder.transfer_for", lambda device: CudaTransfer(device, cuda=fake, pinned=False))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        for batch in batches[:3]:
            parts.loss(model, batch).backward()
            gradients.append(model.layers[1].experts.down_proj.grad.clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    trace = open_trace(tmp_path / "a")
    assert all(torch.equal(trace.gradient(DOWN, step), gradients[step - 1]) for step in (1, 2, 3))
    assert trace.routing().collect().height == 36
    waits = [thread for what, thread in fake.log if what == "host waits"]
    assert waits
    assert set(waits) == {"gradreel-writer"}


def test_cpu_copies_once_in_any_layout() -> None:
    transfer = CpuTransfer()
    source = torch.randn(2, 3, 4).transpose(1, 2)
    copied = transfer.copy(source)
    assert torch.equal(copied, source)
    assert copied.is_contiguous()
    assert copied.data_ptr() != source.data_ptr()
    assert torch.equal(transfer.copy(source, torch.bfloat16, torch.tensor(4.0)), (source / 4).bfloat16())
    with pytest.raises(GradreelError, match=r"device 'meta' cannot be recorded"):
        transfer_for(torch.device("meta"))


def test_lent_buffers_come_back_when_the_last_view_is_gone() -> None:
    pool = BufferPool()
    buffer = pool.take((4,), torch.bfloat16)
    raw = pool.lend(buffer.fill_(1.0))
    assert raw.data.dtype == np.uint16
    view = memoryview(raw.data.view(np.uint8))
    del raw
    other = pool.take((4,), torch.bfloat16)
    assert other.data_ptr() != buffer.data_ptr()  # the view still reads it
    del view
    assert pool.take((4,), torch.bfloat16).data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_presence_codes(dtype: torch.dtype) -> None:
    rows = torch.zeros(6, 40, 20, dtype=dtype)
    rows[1, 0, 0] = 1
    rows[2, 39, 19] = torch.finfo(dtype).tiny  # the last element, as small as can be
    rows[3] = -0.0
    rows[4, 20, 3] = float("nan")
    raw = raw_tensor(rows)
    expected = [ZERO, NONZERO, NONZERO, ZERO, NONZERO, ZERO]
    assert presence_codes(raw.data, raw.dtype, 6).tolist() == expected
    assert int(presence_codes(raw.data, raw.dtype, None)) == NONZERO
    assert int(presence_codes(raw.data[3], raw.dtype, None)) == ZERO
    assert presence_codes(raw.data, raw.dtype, None).shape == ()


def test_spool_survives_its_work_and_counts() -> None:
    done: list[int] = []

    def work(job: int) -> None:
        if job == 1:
            raise OSError("disk")
        done.append(job)

    spool = Spool(work, limit=2)
    for job in range(4):
        assert spool.reserve()
        spool.put(job)
    spool.drain()
    assert done == [0, 2, 3]
    assert spool.lost == 1
    assert isinstance(spool.first_error, OSError)
    spool.close()
    with pytest.raises(GradreelError, match=r"choose 'block' or 'drop'"):
        Spool(work, when_full="forget")
    with pytest.raises(GradreelError, match=r"queue_steps 0"):
        Spool(work, limit=0)


def test_what_is_on_the_host_already_needs_no_device(fake_cuda: Any) -> None:
    """Adam's step counters, a user's mask, and ids that went over for another optimizer of the same step."""
    transfer = CudaTransfer(torch.device("cuda"), cuda=fake_cuda(), pinned=False)  # record_stream would raise here
    transfer.begin(8)
    counter = torch.tensor(7.0)
    copied = transfer.copy(counter)
    counter += 1
    assert copied.item() == 7
    mask = torch.tensor([True, False])
    assert transfer.small(mask) is mask


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_of_narrow_gradients_is_wide(dtype: torch.dtype) -> None:
    gradients = [torch.full((100, 100), 1000.0, dtype=dtype), torch.full((3,), 1.0, dtype=dtype)]
    norm = total_norm(gradients, None)
    assert norm is not None
    assert norm.item() == pytest.approx((1e10 + 3) ** 0.5, rel=1e-5)  # beyond what float16 holds
