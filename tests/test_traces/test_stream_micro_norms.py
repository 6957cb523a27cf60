"""The stream `micro_norms` against gradients taken one by one, and the noise scale made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from traces.errors import GradreelError
from traces.reader import Trace, open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder
from traces.views import StepView

DOWN, ROUTER = "layers.1.experts.down_proj", "layers.1.router.weight"
STREAMS = ("gradient", "routing", "micro_norms", "scalars")


def alone(model: Any, batch: torch.Tensor, parts: Any) -> dict[str, torch.Tensor]:
    """The gradient of one micro-step by itself."""
    names = [n for n, p in model.named_parameters()]
    found = torch.autograd.grad(parts.loss(model, batch), list(model.parameters()), allow_unused=True)
    return {n: g for n, g in zip(names, found, strict=True) if g is not None}


def tokens_of(trace: Trace, step: int) -> np.ndarray:
    """Routed tokens [M, E] by hand, from the routing table."""
    rows = trace.routing().collect()
    rows = rows.filter(rows["step"] == step)
    out = np.zeros((rows["micro_step"].max() + 1, 5))
    for row in rows.iter_rows(named=True):
        for slot in ("expert_0", "expert_1"):
            out[row["micro_step"], row[slot]] += 1
    return out


@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "listed"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
def test_norms_and_tokens_of_each_micro_step(
    tmp_path: Path, make_model, batches, parts, notes, listed: bool, clip: float | None
) -> None:
    model = make_model(parts.List() if listed else parts.Moe())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth, factors = [], []
    with Recorder(tmp_path / "a", model, optimizer, RecordAt(streams=STREAMS), notify=notes.append):
        for step in range(2):
            model.eval()  # a forward of no training, so that it does not count
            truth.append([alone(model, b, parts) for b in batches[4 * step : 4 * step + 4]])
            model.train()
            for batch in batches[4 * step : 4 * step + 4]:
                parts.loss(model, batch).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip) if clip else None
            factors.append(1.0 if norm is None else min(1.0, clip / (float(norm) + 1e-6)))
            optimizer.step()
            optimizer.zero_grad()
    trace = open_trace(tmp_path / "a")
    assert trace.verify() == []
    for name in [n for n in truth[0][0] if "layers.1" in n and trace.presence(n, 1).any()]:
        stacked = trace.param(name).expert_axis is not None
        for step in (1, 2):
            norms, tokens = trace.micro_norms(name, step)
            assert norms.shape == tokens.shape == (4, 5 if stacked else 1)
            for m, gradients in enumerate(truth[step - 1]):
                gradient = gradients.get(name, torch.zeros(1)).double()
                squares = gradient.square().flatten(1).sum(1) if stacked else gradient.square().sum().reshape(1)
                np.testing.assert_allclose(norms[m], squares.numpy() * factors[step - 1] ** 2, rtol=2e-5, atol=1e-12)
            expert = trace.param(name).expert
            counted = tokens_of(trace, step)
            wanted = counted if stacked else np.full((4, 1), 12) if expert is None else counted[:, [expert]]
            assert (tokens == wanted).all()


def test_the_noise_scale_in_replay_is_the_formula(tmp_path: Path, make_model, batches, parts, notes) -> None:
    from toolkit import replay

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    truth = []
    with Recorder(tmp_path / "a", model, optimizer, RecordAt(streams=STREAMS), notify=notes.append):
        for step in range(2):
            model.eval()
            truth.append([alone(model, b, parts)[DOWN].double() for b in batches[4 * step : 4 * step + 4]])
            model.train()
            for batch in batches[4 * step : 4 * step + 4]:
                parts.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = open_trace(tmp_path / "a")
    result = replay(trace, "sgd", metrics=["gradient_noise_scale"], per_expert=True, progress=False)
    rows = result.frame.filter(result.frame["param"] == DOWN).sort("expert")
    signal, noise = np.zeros(5), np.zeros(5)
    for step in (1, 2):
        counts = tokens_of(trace, step)
        for e in range(5):
            b = [counts[m, e] for m in range(4) if counts[m, e]]
            small = [float(truth[step - 1][m][e].square().sum()) for m in range(4) if counts[m, e]]
            total = sum(b)
            big = float(sum(truth[step - 1])[e].square().sum()) / total**2
            mean = np.mean([s / n**2 for s, n in zip(small, b, strict=True)])
            spread = (mean - big) / (np.mean([1 / n for n in b]) - 1 / total)
            noise[e] += total**2 * spread
            signal[e] += total**2 * (big - spread / total)
    for e, value in enumerate(rows["value"].to_list()):
        if signal[e] > 0:
            assert value == pytest.approx(noise[e] / signal[e], rel=1e-4)
        else:
            assert value is None
    assert any(signal > 0)
    views: list[StepView] = [v for v in trace.views() if v.param is not None and v.param.name == DOWN]
    assert views[0].micro_norms.shape == views[0].micro_tokens.shape == (4, 5)


def test_what_is_not_known_is_null(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Two forwards under one backward, and two backwards of one forward, have no norms of their own."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Recorder(tmp_path / "a", model, optimizer, RecordAt(streams=STREAMS), notify=notes.append):
        (parts.loss(model, batches[0]) + parts.loss(model, batches[1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = parts.loss(model, batches[2])
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    trace = open_trace(tmp_path / "a")
    first, second = (trace.micro_norms(ROUTER, step)[0] for step in (1, 2))
    assert np.isnan(first[:, 0]).tolist() == [True, False]
    assert np.isnan(second).all()


def test_momentum_hidden_in_the_gradient_adds_nothing(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """MESH keeps its buffer in `.grad`; the norm is that of what backward adds to it."""
    from toolkit.optim import make_optimizer

    norms = []
    for recipe in ("mesh", "sgd"):
        model = make_model()
        optimizer = make_optimizer(model, recipe, lr=0.0)
        with Recorder(tmp_path / recipe, model, optimizer, RecordAt(streams=STREAMS), notify=notes.append):
            for batch in batches[:3]:
                parts.loss(model, batch).backward()
                parts.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        trace = open_trace(tmp_path / recipe)
        norms.append(np.stack([trace.micro_norms(DOWN, step)[0] for step in (1, 2, 3)]))
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5, atol=1e-12)


def test_a_scaled_loss_is_unscaled(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """GradScaler, plain and fused: norms in the scale of the recorded gradient."""
    found = []
    for name, fused, scaled in (("plain", False, True), ("fused", True, True), ("bare", False, False)):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        with Recorder(tmp_path / name, model, optimizer, RecordAt(streams=STREAMS), notify=notes.append):
            for batch in batches[:2]:
                scaler.scale(parts.loss(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(open_trace(tmp_path / name).micro_norms(DOWN, 1)[0])
    np.testing.assert_allclose(found[0], found[2], rtol=1e-5)
    np.testing.assert_allclose(found[1], found[2], rtol=1e-5)


def test_tokens_need_routing(tmp_path: Path, make_model) -> None:
    model = make_model()
    at = RecordAt(streams=("gradient", "micro_norms"))
    with pytest.raises(GradreelError, match=r"'micro_norms' counts routed tokens; name 'routing'"):
        Recorder(tmp_path / "a", model, torch.optim.SGD(model.parameters(), lr=0.1), at)
