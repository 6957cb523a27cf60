"""The stream `probe`: a fixed batch routed now and then, of which the training shows no trace."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from traces.errors import GradreelError
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder

ROUTER = "layers.1.router.weight"
STREAMS = ("gradient", "routing", "scalars", "probe")


class Restless(nn.Module):
    """Wraps a block with everything that a forward can change: dropout, noise, running means, counters, generators."""

    def __init__(self, block: nn.Module, hidden: int) -> None:
        super().__init__()
        self.block, self.drop, self.norm = block, nn.Dropout(0.3), nn.BatchNorm1d(hidden)
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("forwards", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.forwards += 1  # in evaluation too, as careless models do
        self.cache = torch.arange(hidden.shape[1]).float()
        jitter = random.random() + np.random.rand() + float(torch.rand(1, generator=self.generator))
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return self.block(self.drop(hidden + 1e-3 * jitter + 0.01 * torch.randn_like(hidden)))


def train(make_model: Any, parts: Any, batches: Any, recipe: str, path: Path | None, probe: Any) -> tuple[Any, ...]:
    """Weights, buffers, gradients and random states at the end of six steps, with or without a probe."""
    from toolkit.optim import make_optimizer

    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)
    model = make_model(Restless(parts.Moe(), parts.hidden))
    torch.manual_seed(3)
    optimizer = make_optimizer(model, recipe, lr=0.05)
    streams = STREAMS if probe is not None else STREAMS[:3]
    recorder = Recorder(
        path, model, optimizer, RecordAt(streams=streams, probe_every=2), probe=probe, notify=lambda text: None
    )
    with recorder:
        for batch in batches[:6]:
            parts.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    states = [torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(np.int64))]
    states += [torch.tensor(random.getstate()[1], dtype=torch.int64), model.layers[1].generator.get_state()]
    grads = [torch.zeros(1) if p.grad is None else p.grad.clone() for p in model.parameters()]
    flags = torch.tensor([module.training for module in model.modules()])
    return ([p.detach().clone() for p in model.parameters()], list(model.buffers()), grads, states, [flags])


@pytest.mark.parametrize("recipe", ["adamw", "mesh"])
def test_training_is_bit_equal_with_and_without(tmp_path: Path, make_model, batches, parts, recipe: str) -> None:
    """Dropout, noise, BatchNorm, a counter in a buffer, four kinds of generators, momentum hidden in `.grad`."""
    probe = torch.randint(0, 16, (3, 5))
    plain = train(make_model, parts, batches, recipe, tmp_path / "a", None)
    probed = train(make_model, parts, batches, recipe, tmp_path / "b", probe)
    for left, right in zip(plain, probed, strict=True):
        assert [torch.equal(x, y) for x, y in zip(left, right, strict=True)] == [True] * len(left)
    one, other = open_trace(tmp_path / "a"), open_trace(tmp_path / "b")
    assert one.routing().collect().equals(other.routing().collect())  # counts of the training are its own
    assert one.scalars()["tokens"].to_list()[:6] == other.scalars()["tokens"].to_list()[:6]
    assert other.probe_steps() == [1, 3, 5, 7]


def test_ids_are_those_of_the_weights_before_the_step(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    probe, mask = torch.randint(0, 16, (2, 7)), torch.ones(2, 7)
    mask[1, 4:] = 0
    wanted = []

    def ids() -> list[list[int]]:
        hidden = model.embed(probe)
        hidden = hidden + model.layers[0](hidden)
        chosen = model.layers[1].router(hidden.reshape(-1, hidden.shape[-1]))[2]
        return chosen[mask.reshape(-1) > 0].tolist()  # padding never counts

    at = RecordAt(streams=STREAMS, bursts=(1, 3), probe_every=2)
    with Recorder(
        tmp_path / "a", model, optimizer, at, probe={"ids": probe, "attention_mask": mask}, notify=notes.append
    ):
        for number, batch in enumerate(batches[:4]):
            if number % 2 == 0:
                wanted.append(ids())
            parts.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted.append(ids())
    trace = open_trace(tmp_path / "a")
    assert trace.verify() == []
    assert trace.probe_steps() == [1, 3, 5]
    assert trace.steps == [1, 4]
    for step, chosen in zip((1, 3, 5), wanted, strict=True):
        routing = trace.probe_step(step, 1)
        assert routing.topk_expert_ids.tolist() == chosen
        assert routing.tokens_per_expert.sum() == 11 * 2
        rows = trace.probe().filter(trace.probe()["step"] == step)
        assert [list(row) for row in rows.select("expert_0", "expert_1").rows()] == chosen
    assert trace.probe_step(2, 1) is None
    assert [v.step for v in trace.views() if v.probe is not None] == [1]


def test_the_probe_metrics_in_replay(tmp_path: Path, make_model, batches, parts, notes) -> None:
    from toolkit import replay

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    at = RecordAt(streams=STREAMS, probe_every=2)
    with Recorder(tmp_path / "a", model, optimizer, at, probe=torch.randint(0, 16, (4, 6)), notify=notes.append):
        for batch in batches:
            parts.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = open_trace(tmp_path / "a")
    names = ["routing_churn", "router_saturation", "last_fluctuation_step"]
    frame = replay(trace, "sgd", metrics=names, lags={"routing_churn": 2}, progress=False).frame
    probes = {step: trace.probe_step(step, 1).topk_expert_ids for step in (1, 3, 5, 7, 9)}
    same = {s: np.mean([len(set(a) & set(b)) / 2 for a, b in zip(probes[s], probes[9], strict=True)]) for s in probes}
    saturation = frame.filter(frame["metric"] == "router_saturation").sort("step")
    assert saturation["value"].to_list() == pytest.approx([same[s] for s in (1, 3, 5, 7, 9)])
    pairs = [(1, 3), (3, 5), (5, 7), (7, 9)]
    changed = [
        np.mean([1 - len(set(a) & set(b)) / 2 for a, b in zip(probes[x], probes[y], strict=True)]) for x, y in pairs
    ]
    churn = frame.filter((frame["metric"] == "routing_churn") & frame["step"].is_not_null()).sort("step")
    assert churn["value"].to_list() == pytest.approx(changed)
    assert churn["step"].to_list() == [3, 5, 7, 9]
    moved = [max((s for s in (1, 3, 5, 7) if set(probes[s][t]) != set(probes[9][t])), default=None) for t in range(24)]
    known = [m for m in moved if m is not None]
    last = frame.filter((frame["metric"] == "last_fluctuation_step") & (frame["flag"] == "mean"))
    assert last["value"].to_list() == pytest.approx([np.mean(known)])


def test_mistakes_are_told_at_once_and_failures_later_cost_nothing_else(
    tmp_path: Path, make_model, batches, parts, notes
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GradreelError, match=r"the stream 'probe' needs a batch"):
        Recorder(tmp_path / "a", model, optimizer, RecordAt(streams=STREAMS))
    with pytest.raises(GradreelError, match=r"probe= is given, the stream 'probe' is not recorded"):
        Recorder(tmp_path / "a", model, optimizer, probe=batches[0])
    with pytest.raises(GradreelError, match=r"probe is a str"):
        Recorder(tmp_path / "a", model, optimizer, RecordAt(streams=STREAMS), probe="text")

    def once(batch: Any, spoil: int | None = None) -> None:
        at = RecordAt(streams=STREAMS, probe_every=1)
        with Recorder(tmp_path / str(spoil), model, optimizer, at, probe=batch, notify=notes.append) as reel:
            for number, each in enumerate(batches[:3]):
                if number == spoil:
                    reel._probe._args = (None,)
                parts.loss(model, each).backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(GradreelError, match=r"probe: calling the model with it failed \(\w+: .*give what the model"):
        once(torch.ones(2, 3) * 0.5)
    once(batches[0], spoil=1)
    assert any("could not be routed at step 2" in note for note in notes)
    trace = open_trace(tmp_path / "1")
    assert trace.steps == [1, 2, 3]
    assert trace.probe_steps() == [1]
    assert model.training


def test_the_probe_runs_under_the_autocast_of_training(tmp_path: Path, make_model, batches, parts, notes) -> None:
    seen = []
    model = make_model()
    model.layers[1].router.register_forward_hook(lambda m, a, out: seen.append((m.training, out[0].dtype)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = RecordAt(streams=STREAMS)
    with Recorder(tmp_path / "a", model, optimizer, at, probe=(batches[0],), notify=notes.append):
        with torch.autocast("cpu", torch.bfloat16):
            loss = parts.loss(model, batches[0])
        loss.backward()
        optimizer.step()
    assert seen[:2] == [(True, torch.bfloat16), (False, torch.bfloat16)]
