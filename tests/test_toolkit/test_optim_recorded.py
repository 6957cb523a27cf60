"""An optimizer with hidden momentum under a live Recorder: the recorded gradient is this step's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ablations.models import MoEConfig, MoELanguageModel
from toolkit.optim import make_optimizer
from toolkit.recipes import Stepper
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder
from traces.views import StepView

CONFIG = MoEConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=16,
    dense_hidden=16,
    expert_hidden=8,
    num_experts=4,
    top_k=1,
    moe_layers=(1,),
)


def model() -> MoELanguageModel:
    torch.manual_seed(0)
    return MoELanguageModel(CONFIG)


def batch(step: int) -> dict[str, Any]:
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens.roll(-1, 1)}


def loop(net: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        net(**batch(step)).loss.backward()
        optimizer.step()


def test_recording_mesh_sees_fresh_gradients_and_changes_nothing() -> None:
    unwatched, watched, replayed = model(), model(), model()
    loop(unwatched, make_optimizer(unwatched, "mesh"), 6)

    optimizer = make_optimizer(watched, "mesh")
    steps: list[list[Any]] = []

    def keep(views: Any) -> None:
        steps.append([(v.param, v.gradient.clone(), v.presence) for v in views if isinstance(v, StepView) and v.param])

    with Recorder(None, watched, optimizer, on_step=keep):
        loop(watched, optimizer, 6)
    for one, other in zip(unwatched.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)

    # Replaying what was recorded through the same recipe gives the same experts, bit for bit.
    steppers = {}
    weights = dict(replayed.named_parameters())
    for views in steps:
        for info, gradient, presence in views:
            if info.role != "routed_expert":
                continue
            stepper = steppers.setdefault(info.name, Stepper(optimizer.recipe, info))
            stepper.step(weights[info.name].detach(), gradient, lr=optimizer.recipe.lr, presence=presence)
    assert steppers
    for name in steppers:
        assert torch.equal(weights[name], dict(watched.named_parameters())[name]), name


def test_the_recorded_buffer_is_the_decayed_sum(tmp_path: Path) -> None:
    net = model()
    optimizer = make_optimizer(net, "mesh", beta=0.5)
    at = RecordAt(roles=("routed_expert",), streams=("gradient", "grad_buffer"))
    with Recorder(tmp_path / "mesh.trace", net, optimizer, at=at, notify=lambda _: None):
        loop(net, optimizer, 4)
    trace = open_trace(tmp_path / "mesh.trace")
    name = next(n for n, p in net.named_parameters() if p.dim() == 3)
    total, moved = torch.zeros(()), False
    for step in range(1, 5):
        gradient, buffer = trace.gradient(name, step), trace.tensor("grad_buffer", name, step)
        assert gradient is not None
        assert buffer is not None
        busy = gradient.flatten(1).any(1)[:, None, None]
        total = torch.where(busy, total + gradient, total)
        torch.testing.assert_close(buffer, total, rtol=1e-5, atol=1e-7)
        moved = moved or not torch.equal(gradient, buffer)
        total = torch.where(busy, 0.5 * total, total)
    assert moved, "history was never there"


def test_recording_may_begin_in_the_middle() -> None:
    net = model()
    optimizer = make_optimizer(net, "mesh")
    loop(net, optimizer, 3)
    seen = []
    with Recorder(None, net, optimizer, on_step=lambda views: seen.extend(views)):
        loop(net, optimizer, 2)
    assert seen
