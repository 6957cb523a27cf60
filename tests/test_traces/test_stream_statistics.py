"""The stream `statistics` against loops in float64, and what a run recorded by it takes on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from traces.errors import GradreelError
from traces.expert_sample import load_of
from traces.hooks import MicroStep
from traces.reader import Trace, open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder
from traces.statistics import GradientStatistics, pair_stride, plain_statistics
from traces.statistics_fields import PAIRED, STATISTICS
from traces.views import NONE, NONZERO, ZERO, ParamInfo

DOWN, ROUTER = "layers.1.experts.down_proj", "layers.1.router.weight"
ONLY = ("statistics", "scalars")


def train(model: Any, optimizer: Any, batches: Any, parts: Any) -> list[dict[str, torch.Tensor | None]]:
    """A plain loop; the gradients each step was taken with."""
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        parts.loss(model, batch).backward()
        seen.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return seen


def expected(gradient: torch.Tensor, before: torch.Tensor | None, stacked: bool) -> dict[str, list[float]]:
    """The same numbers by a slow loop."""
    rows = gradient.double().flatten(1).numpy() if stacked else gradient.double().reshape(1, -1).numpy()
    old = [None] * len(rows) if before is None else before.double().reshape(rows.shape).numpy()
    out: dict[str, list[float]] = {name: [] for name in STATISTICS}
    for row, other in zip(rows, old, strict=True):
        finite = [x for x in row if math.isfinite(x)]
        out["sum_squares"].append(math.fsum(x * x for x in finite))
        out["nonfinite"].append(len(row) - len(finite))
        out["zeros"].append(sum(x == 0 for x in row))
        pairs = [] if other is None else [(x, y) for x, y in zip(row, other, strict=True) if math.isfinite(x + y)]
        nan = math.nan
        out["dot"].append(nan if other is None else math.fsum(x * y for x, y in pairs))
        out["dot_squares"].append(nan if other is None else math.fsum(x * x for x, _ in pairs))
        out["previous_squares"].append(nan if other is None else math.fsum(y * y for _, y in pairs))
        out["sign_flips"].append(nan if other is None else sum(np.sign(x) * np.sign(y) < 0 for x, y in pairs))
        out["sign_support"].append(nan if other is None else sum(x != 0 and y != 0 for x, y in pairs))
    return out


def stored(trace: Trace, name: str, step: int) -> np.ndarray:
    raw = trace.raw("statistics", name, step)
    assert raw is not None
    return raw.data


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
def test_every_expert_at_every_step(tmp_path: Path, make_model, batches, parts, notes, kernel: bool) -> None:
    from toolkit.kernels import step_statistics

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = RecordAt(bursts=(2, 4), experts=2, streams=("gradient", "routing", *ONLY))
    with Recorder(
        tmp_path / "a", model, optimizer, at, statistics=step_statistics if kernel else None, notify=notes.append
    ) as reel:
        seen = train(model, optimizer, batches, parts)
        assert reel.buffer_bytes > sum(seen[0][n].nbytes for n in (DOWN, ROUTER))
    trace = open_trace(tmp_path / "a")
    assert trace.verify() == []
    assert trace.steps == [1, 2, 5, 6]
    for name, stacked in ((DOWN, True), (ROUTER, False)):
        for step in range(1, 9):
            before = seen[step - 2][name] if step > 1 else None
            wanted = expected(seen[step - 1][name], before, stacked)
            np.testing.assert_allclose(
                stored(trace, name, step), np.array(list(wanted.values())), rtol=1e-12, atol=1e-300
            )
    frame = trace.statistics(DOWN)
    assert frame.height == 8 * 5
    busy = frame.filter(frame["zeros"] < frame["elements"])
    assert busy["grad_norm"].to_list() == pytest.approx(busy["sum_squares"].sqrt().to_list())
    assert frame.filter(frame["step"] == 1)["grad_cos"].null_count() == 5
    idle = frame.filter(frame["zeros"] == frame["elements"])
    assert idle["grad_cos"].null_count() == idle["sign_flip_rate"].null_count() == idle.height
    codes = [trace.presence(DOWN, step)[e] for step in range(1, 9) for e in range(5)]
    assert codes == [ZERO if z else NONZERO for z in (frame["zeros"] == frame["elements"]).to_list()]


def test_only_statistics_keep_no_gradient(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model(parts.List())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = RecordAt(streams=ONLY, weights="none")
    with Recorder(tmp_path / "a", model, optimizer, at, notify=notes.append):
        seen = train(model, optimizer, batches, parts)
    trace = open_trace(tmp_path / "a")
    assert trace.verify() == []
    assert trace.weight_steps() == []
    assert trace.all_steps == list(range(1, 9))
    name = next(n for step in seen for n, g in step.items() if "experts" in n and g is None)
    step = next(s for s, g in enumerate(seen, 1) if g[name] is None)
    assert trace.presence(name, step) == NONE
    assert trace.raw("statistics", name, step) is None
    if step < 8 and seen[step][name] is not None:  # no pair across a step without a gradient
        assert np.isnan(stored(trace, name, step + 1)[3:]).all()


def test_pairs_over_a_part_of_the_elements() -> None:
    """The norm is exact, the cosine that of every 5th element: odd, so that it does not follow columns of 8."""
    info = ParamInfo("w", "routed_expert", (3, 8, 12), expert_axis=1, num_experts=8)
    first, second = torch.randn(3, 8, 12), torch.randn(3, 8, 12)
    statistics = GradientStatistics(pair_elements=9)
    statistics.take(info, first, None, 4)
    found = dict(zip(STATISTICS, statistics.take(info, second, None, 5), strict=True))
    rows, old = (x.movedim(1, 0).reshape(8, 36).double() for x in (second, first))
    assert pair_stride(36, 9) == 5
    torch.testing.assert_close(found["sum_squares"], rows.square().sum(1))
    torch.testing.assert_close(found["dot"], (rows * old)[:, ::5].sum(1))
    torch.testing.assert_close(found["previous_squares"], old[:, ::5].square().sum(1))
    assert statistics.kept_bytes == 8 * 8 * 4
    assert [pair_stride(n, 10) for n in (0, 1, 10, 11, 30, 31)] == [0, 1, 1, 3, 3, 5]


def test_the_loss_scale_is_divided_out_of_both_steps() -> None:
    info = ParamInfo("w", "router", (4, 6))
    first, second = torch.randn(4, 6), torch.randn(4, 6)
    statistics, scaled = GradientStatistics(), GradientStatistics()
    scale = torch.tensor(1024.0)
    statistics.take(info, first, None, 1)
    scaled.take(info, first * 1024, scale, 1)
    scale /= 4  # as a GradScaler changes it, in place
    torch.testing.assert_close(scaled.take(info, second * 256, scale, 2), statistics.take(info, second, None, 2))


def test_an_infinite_expert_spoils_no_other() -> None:
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    broken = x.clone()
    broken[1, 2], broken[1, 3] = math.nan, math.inf
    clean, found = (plain_statistics(g, y, expert_axis=0) for g in (x, broken))
    for name in STATISTICS:
        assert found[name][0] == clean[name][0]
        assert found[name][2] == clean[name][2]
    assert found["nonfinite"].tolist() == [0, 2, 0]
    assert found["dot"][1].item() == pytest.approx((x * y).double()[1, [0, 1, 4]].sum().item())


def test_a_skipped_step_leaves_no_pair(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """A fused optimizer under a scaler: the inf step is dropped, and so is the pair of the step after it."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with Recorder(tmp_path / "a", model, optimizer, RecordAt(streams=ONLY), notify=notes.append):
        for number, batch in enumerate(batches[:5]):
            parts.loss(model, batch).backward()
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(number == 2))
            if number == 2:
                model.layers[1].router.weight.grad.fill_(math.inf)
            optimizer.step()
            optimizer.zero_grad()
    trace = open_trace(tmp_path / "a")
    assert trace.scalars().filter(trace.scalars()["skipped"])["step"].to_list() == [3]
    assert [bool(np.isnan(stored(trace, ROUTER, step)[3:]).all()) for step in (1, 2, 4, 5)] == [
        True,
        False,
        True,
        False,
    ]


def test_a_sample_is_cut_before_the_copy(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Experts by load at each burst's start; weights and gradients of those alone reach the host."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    at = RecordAt(bursts=(2, 4), experts=2, resample=True, weights="bursts")
    with Recorder(tmp_path / "a", model, optimizer, at, notify=notes.append) as reel:
        seen = train(model, optimizer, batches, parts)
        taken = reel.buffer_bytes
    trace = open_trace(tmp_path / "a")
    assert trace.verify() == []
    assert taken < 6 * 2 * sum(seen[0][n].nbytes for n in seen[0] if "experts" in n)
    for first in (1, 5):
        loads = trace.routing_step(first, 1).tokens_per_expert
        wanted = at.choose_experts(5, loads)
        assert trace.experts(DOWN, first).tolist() == wanted.tolist()
        for step in (first, first + 1):
            gradient = trace.gradient(DOWN, step)
            assert torch.equal(gradient, seen[step - 1][DOWN][wanted])
            full = seen[step - 1][DOWN].flatten(1).any(1)
            assert (trace.presence(DOWN, step) == np.where(full, NONZERO, ZERO)).all()  # of every expert
    assert trace.weight_steps(DOWN) == [1, 3, 5, 7, 9]
    assert trace.weight(DOWN, 3).shape[0] == 2


def test_the_load_leaves_out_padding_and_dropped_slots(parts) -> None:
    class Layer:
        layer, num_experts, in_decoder = 0, 4, False

    from traces.executed_ids import Capture

    micro = MicroStep(torch.tensor([[1, 1, 0]]))
    micro.by_router[0] = Capture(torch.tensor([[0, 1], [1, -1], [3, 3]], dtype=torch.int16))
    assert load_of([micro, micro], Layer(), torch.device("cpu")).tolist() == [2, 4, 0, 0]


def test_mistakes_are_told(tmp_path: Path, make_model, parts) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GradreelError, match=r"statistics= is given, the stream 'statistics' is not recorded"):
        Recorder(tmp_path / "a", model, optimizer, statistics=plain_statistics)
    with pytest.raises(GradreelError, match=r"statistics is a int; give a function"):
        Recorder(tmp_path / "a", model, optimizer, RecordAt(streams=ONLY), statistics=3)
    with pytest.raises(GradreelError, match=r"statistics are written to disk"):
        Recorder(None, model, optimizer, RecordAt(streams=ONLY), on_step=print)
    with pytest.raises(GradreelError, match=r"resample=True draws a sample at each burst"):
        RecordAt(experts=2, resample=True)
    with pytest.raises(GradreelError, match=r"gave no 'zeros'; it must return tensors \[E\]"):
        GradientStatistics(lambda g, p, expert_axis: {"sum_squares": g, "nonfinite": g}).take(
            ParamInfo("w", "router", (2,)), torch.ones(2), None, 1
        )


def test_the_names_are_those_of_the_kernel() -> None:
    from toolkit.kernels import step_statistics

    values = step_statistics(torch.randn(2, 3), torch.randn(2, 3), expert_axis=0).as_dict()
    assert set(STATISTICS) <= set(values)
    assert set(PAIRED) <= set(STATISTICS)
