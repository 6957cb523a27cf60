"""What recording costs: bytes on disk as planned, memory as stated, and nobody who waits for the device in a hook."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from traces.hooks import ForwardWatch
from traces.plan import Plan
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder
from traces.roles import describe_params
from traces.schema import LayerInfo
from traces.spool import CudaTransfer

ALL = ("gradient", "routing", "scalars", "statistics", "micro_norms", "probe")
#: Operations whose result the host must know, or whose shape depends on values: a GPU is waited for.
WAITING = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "equal", "repeat_interleave")


class Waits(TorchDispatchMode):
    """Writes down what would wait for a device on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].lstrip("_")
        if any(name.startswith(waiting.lstrip("_")) for waiting in WAITING):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def small_model() -> Any:
    from ablations.models import MoEConfig, MoELanguageModel

    torch.manual_seed(0)
    return MoELanguageModel(
        MoEConfig(
            vocab_size=64,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=2,
            head_dim=16,
            max_positions=32,
            dense_hidden=32,
            expert_hidden=32,
            num_experts=16,
            top_k=2,
            moe_layers=(0, 1),
        )
    )


def test_a_run_of_7_billion_parameters_takes_less_than_a_gigabyte_per_1000_steps() -> None:
    """Statistics of all 128 experts at every step; gradients and weights of two, chosen by load, in a burst."""
    from ablations.models import MoEConfig, MoELanguageModel

    with torch.device("meta"):
        model = MoELanguageModel(MoEConfig.skewadam_study())
    infos = describe_params(model)
    assert sum(info.numel for info in infos if info.tied_to is None) > 6.7e9
    at = RecordAt(
        bursts=(2, 1000),
        experts=2,
        streams=("gradient", "routing", "statistics", "scalars"),
        pair_elements=1 << 16,
    )
    size = at.estimate(infos, [LayerInfo(1, "layers.1.mlp.experts", 128, 2)], 8192, 1000)
    assert 0.7e9 < size < 1e9
    statistics = RecordAt(streams=("statistics", "scalars"), weights="none")
    assert statistics.estimate(infos, [], 8192, 1000) < 25e6
    assert Plan(at, infos, []).kept_bytes < 40e6  # on the device, for the step before


def test_the_estimate_is_what_a_run_takes(tmp_path: Path, notes: list[str]) -> None:
    """Two layers of 16 experts, four bursts, three micro-steps, every stream."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    at = RecordAt(bursts=(3, 10), experts=4, streams=ALL, weights="bursts", probe_every=8)
    probe = torch.randint(0, 64, (2, 16))
    with Recorder(tmp_path / "a", model, optimizer, at, probe=probe, notify=notes.append) as reel:
        for _ in range(40):
            for _ in range(3):
                ids = torch.randint(0, 64, (2, 32))
                model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert reel.plan.tokens == 192
        estimate = reel.plan.estimate(40)
        assert reel.buffer_bytes <= reel.plan.ring_bytes + reel.plan.kept_bytes
        assert reel._copier.statistics.kept_bytes == reel.plan.kept_bytes
    size = sum(file.stat().st_size for file in (tmp_path / "a").rglob("*") if file.is_file())
    assert 0.9 < size / estimate < 1.05
    trace = open_trace(tmp_path / "a")
    assert trace.verify() == []
    assert len(trace.weight_steps()) == 9  # four starts, four ends, and the last
    (note,) = notes
    for said in ("a recorded step", "per 1000 steps", "% of the free disk", "of host memory for copies", "step before"):
        assert said in note


@pytest.mark.parametrize("streams", [ALL, ("statistics", "scalars")], ids=["all", "statistics"])
def test_no_hook_waits_for_the_device(
    tmp_path: Path, make_model, batches, parts, notes, fake, monkeypatch, streams: tuple[str, ...]
) -> None:
    """After the check of the first step; the forward's own waits are told by a run without a recorder."""
    monkeypatch.setattr("traces.recorder.transfer_for", lambda device: CudaTransfer(device, cuda=fake, pinned=False))
    main, read = threading.current_thread(), []
    for name in ("item", "tolist", "numpy", "cpu", "__bool__"):
        plain = getattr(torch.Tensor, name)

        def watched(self: Any, *args: Any, name: str = name, plain: Any = plain, **kwargs: Any) -> Any:
            if threading.current_thread() is main:
                read.append(name)
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, watched)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = RecordAt(
        streams=streams, bursts=(1, 2), experts=2, resample=True, weights="bursts", probe_every=3, pair_elements=8
    )
    probe = batches[0] if "probe" in streams else None
    with Recorder(tmp_path / "a", model, optimizer, at, probe=probe, notify=notes.append):
        for number, batch in enumerate(batches):
            waits = Waits()
            if number == 1:
                read.clear()
            with waits:
                parts.loss(model, batch).backward()
                parts.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            assert not waits.seen or number == 0
        assert read == []
    assert {thread for what, thread in fake.log if what == "host waits"} == {"gradreel-writer"}
    assert open_trace(tmp_path / "a").verify() == []


def test_the_probe_costs_nothing_between_probes(make_model, batches, parts) -> None:
    """The watch's own lists are those of the training again after a probe."""
    model = make_model()
    watch = ForwardWatch(model, [], (), lambda: None)
    watch.micro_steps = before = []
    with watch.aside((), {}) as micro:
        assert watch.micro_steps == [micro]
    assert watch.micro_steps is before
