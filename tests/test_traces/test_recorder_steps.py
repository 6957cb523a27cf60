"""Where gradients are read: scalers, closures, several optimizers, hidden momentum, compiled models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from traces.errors import GradreelError
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder
from traces.views import NONZERO, ZERO

DOWN, ROUTER = "layers.1.experts.down_proj", "layers.1.router.weight"


def scaled_steps(
    model: Any,
    optimizer: Any,
    batches: Any,
    parts: Any,
    *inf_at: int,
    count: int = 3,
    zero_late: bool = False,
    in_place: bool = False,
) -> None:
    """Steps under a CPU GradScaler; the loss of the steps `inf_at` overflows. `zero_late`: zero_grad after forward."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, batch in enumerate(batches[:count], start=1):
        loss = parts.loss(model, batch)
        if zero_late:
            optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if step in inf_at else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if not zero_late:
            optimizer.zero_grad(set_to_none=not in_place)


@pytest.mark.parametrize(("zero_late", "in_place"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("fused", [True, False])
def test_grad_scaler(
    tmp_path: Path, make_model, batches, parts, notes, fused: bool, zero_late: bool, in_place: bool
) -> None:
    """Fault 15: gradients are recorded unscaled; the step with an inf is marked skipped and leaks nothing."""
    model, twin = make_model(), make_model()
    expected = []
    for number, batch in enumerate((batches[0], batches[2])):
        parts.loss(twin, batch).backward()
        expected.append(twin.layers[1].experts.down_proj.grad.clone())
        twin.zero_grad()
        if number == 0:
            assert expected[0].any()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=fused)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        scaled_steps(model, optimizer, batches, parts, 2, zero_late=zero_late, in_place=in_place)
    trace = open_trace(tmp_path / "a")
    assert trace.steps == [1, 3]
    assert trace.scalars()["skipped"].to_list()[:3] == [False, True, False]
    assert torch.equal(trace.gradient(DOWN, 1), expected[0])
    # after the inf the scale is halved, which rounds differently by nothing: powers of two
    assert torch.equal(trace.gradient(DOWN, 3), expected[1])
    assert trace.routing().collect().group_by("step").len()["len"].to_list() == [12, 12]


@pytest.mark.parametrize("fused", [True, False])
def test_infs_in_the_first_steps(tmp_path: Path, make_model, batches, parts, notes, fused: bool) -> None:
    """A scaler that has to find its scale skips more steps than the queue holds."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    first = model.layers[1].experts.down_proj.detach().clone()
    with Recorder(tmp_path / "a", model, optimizer, queue_steps=2, notify=notes.append):
        scaled_steps(model, optimizer, batches, parts, 1, 2, 3, 4, count=6)
    trace = open_trace(tmp_path / "a")
    assert trace.steps == [5, 6]
    assert trace.scalars()["skipped"].to_list()[:6] == [True] * 4 + [False] * 2
    assert torch.equal(trace.weight(DOWN, 5), first)
    assert len(notes) == 1


def test_nothing_but_infs(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def loop() -> None:
        with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
            scaled_steps(model, optimizer, batches, parts, 1, 2, count=2)

    with pytest.raises(GradreelError, match=r"none of 2 optimizer steps could be recorded"):
        loop()


def test_closure(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 16: the gradient after the closure, not the None before it."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parts.loss(model, batches[len(seen)])
        loss.backward()
        seen.append(model.layers[1].experts.down_proj.grad.clone())
        return loss

    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        returned = optimizer.step(closure)
        optimizer.step(closure=closure)
    assert returned.requires_grad
    trace = open_trace(tmp_path / "a")
    for step in (1, 2):
        assert torch.equal(trace.gradient(DOWN, step), seen[step - 1])
    assert trace.routing().collect().height == 24


def test_a_closure_called_again_and_again(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    first: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parts.loss(model, batches[0])
        loss.backward()
        first.append(model.layers[1].experts.down_proj.grad.clone())
        return loss

    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        optimizer.step(closure)
        calls = len(first)
        optimizer.step(closure)
    assert calls > 1
    trace = open_trace(tmp_path / "a")
    assert torch.equal(trace.gradient(DOWN, 2), first[calls])
    assert trace.routing().collect().height == 24


def test_process_wide_hook_finds_optimizers_of_this_model_only(
    tmp_path: Path, make_model, batches, parts, notes
) -> None:
    model, other = make_model(), make_model(seed=3)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, notify=notes.append):
        parts.loss(other, batches[0]).backward()
        foreign.step()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts.loss(model, batches[0]).backward()
        expected = model.layers[1].experts.down_proj.grad.clone()
        optimizer.step()
    trace = open_trace(tmp_path / "a")
    assert trace.steps == [1]
    assert torch.equal(trace.gradient(DOWN, 1), expected)
    assert trace.header.run["groups"][0]["lr"] == 0.1


def test_a_hook_that_changes_gradients_comes_first(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda o, a, k: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) and None)
    with Recorder(tmp_path / "a", model, notify=notes.append):
        parts.loss(model, batches[0]).backward()
        optimizer.step()
    trace = open_trace(tmp_path / "a")
    assert trace.scalars()["grad_norm"][0] == pytest.approx(1e-3, rel=1e-3)
    assert trace.gradient(DOWN, 1).norm() <= 1e-3


def test_a_step_that_raises_does_not_deafen_the_recorder(tmp_path: Path, make_model, batches, parts, notes) -> None:
    class Moody(torch.optim.SGD):
        """Calls its parent's hooked step, and fails the second time."""

        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("moody")
            return super().step(closure)

    model = make_model()
    torch.optim.SGD(model.parameters(), lr=0.1)  # torch has put its hooks around SGD.step now
    optimizer = Moody(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        one_step(model, optimizer, batches[0], parts)
        with pytest.raises(RuntimeError, match="moody"):
            one_step(model, optimizer, batches[1], parts)
        one_step(model, optimizer, batches[2], parts)
    assert open_trace(tmp_path / "a").steps == [1, 2, 3]


def test_two_optimizers_make_one_step(tmp_path: Path, make_model, batches, parts, notes) -> None:
    for given in (True, False):
        model = make_model()
        experts = torch.optim.SGD(model.layers[1].experts.parameters(), lr=0.1)
        rest = torch.optim.AdamW([p for n, p in model.named_parameters() if "experts" not in n], lr=0.01)
        with Recorder(tmp_path / str(given), model, [experts, rest] if given else None, notify=notes.append):
            for batch in batches[:2]:
                parts.loss(model, batch).backward()
                experts.step()
                rest.step()
                model.zero_grad()
        trace = open_trace(tmp_path / str(given))
        assert trace.steps == [1, 2]
        assert trace.gradient(DOWN, 2) is not None
        assert trace.gradient(ROUTER, 2) is not None
        assert trace.scalars()["lr"][1].to_list() == [0.1, 0.01]


def test_state_from_before_the_recording_is_stored(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts.loss(model, batches[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {k: v.clone() for k, v in optimizer.state[model.layers[1].experts.down_proj].items()}
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        parts.loss(model, batches[1]).backward()
        optimizer.step()
    trace = open_trace(tmp_path / "a")
    assert {s for s in trace.streams if s.startswith("state.")} == {"state.step", "state.exp_avg", "state.exp_avg_sq"}
    raw = trace.raw("state.exp_avg", DOWN, 1)
    assert torch.equal(torch.from_numpy(raw.data.copy()), before["exp_avg"])
    assert float(trace.raw("state.step", DOWN, 1).data) == 1.0


class HiddenMomentum(torch.optim.SGD):
    """Keeps 0.9 of the buffer in `.grad` between steps; the fresh gradient is what backward added."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.0)
        self.before: dict[int, torch.Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.9)
                    self.before[id(p)] = p.grad.clone()
        return out

    def fresh_gradient(self, param: torch.Tensor) -> torch.Tensor | None:
        if param.grad is None:
            return None
        return param.grad - self.before[id(param)] if id(param) in self.before else param.grad.clone()


def test_hidden_momentum(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 12b: gradients 1, 1, 0, 0 are recorded as such, and the decayed buffer is a stream of its own."""
    model = make_model()
    optimizer = HiddenMomentum(model.parameters())
    down = model.layers[1].experts.down_proj
    at = RecordAt(streams=("gradient", "grad_buffer", "scalars"))
    with Recorder(tmp_path / "a", model, optimizer, at=at, notify=notes.append):
        for value in (1.0, 1.0, 0.0, 0.0):
            (down.sum() * value).backward()
            optimizer.step()
    trace = open_trace(tmp_path / "a")
    fresh = [trace.gradient(DOWN, step) for step in (1, 2, 3, 4)]
    torch.testing.assert_close(torch.stack(fresh)[:, 0, 0, 0], torch.tensor([1.0, 1, 0, 0]), atol=1e-6, rtol=0)
    assert trace.presence(DOWN, 1).tolist() == [NONZERO] * 5
    assert trace.presence(DOWN, 3).tolist() == [ZERO] * 5
    buffer = [float(trace.raw("grad_buffer", DOWN, step).data[0, 0, 0]) for step in (1, 2, 3)]
    assert buffer == pytest.approx([1.0, 1.9, 1.71], rel=1e-5)


@pytest.mark.parametrize("mode", ["attached", "apart"])
def test_a_mesh_run_records_fresh_gradients(tmp_path: Path, make_model, batches, parts, notes, mode: str) -> None:
    """Fault 12b on the project's own optimizer, with accumulation: what backward gave, never the momentum."""
    from toolkit.optim import make_optimizer

    model, twin = make_model(), make_model()
    optimizer = make_optimizer(model, "mesh", lr=1e-2, hidden_momentum=mode)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        expected = []
        for first, second in (batches[:2], batches[2:4], batches[4:6]):
            twin.load_state_dict(model.state_dict())
            for one in (model, twin):
                parts.loss(one, first).backward()
                parts.loss(one, second).backward()
            expected.append({name: p.grad.clone() for name, p in twin.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            twin.zero_grad()
    trace = open_trace(tmp_path / "a")
    assert trace.steps == [1, 2, 3]
    assert str(trace.header.run["recipe"]).startswith("mesh")
    for step in trace.steps:
        for name in (DOWN, ROUTER):
            assert torch.equal(trace.gradient(name, step), expected[step - 1][name])
    assert trace.routing().collect().height == 3 * 24


def test_compiled_before_recording_is_named(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 14: hooks that come after the first compiled call stay silent, and that is an error."""
    torch._dynamo.reset()
    model = make_model()
    compiled = torch.compile(model, backend="eager")
    parts.loss(compiled, batches[0]).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GradreelError, match=r"layers\.1\.experts.*compiled"):  # noqa: SIM117
        with Recorder(tmp_path / "a", compiled, optimizer, notify=notes.append):
            one_step(compiled, optimizer, batches[1], parts)


def test_a_silent_module_is_named(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model(parts.Moe(), parts.Moe())
    silent = model.layers[2]
    silent.forward = lambda hidden: hidden * silent.experts.down_proj.sum()  # goes around its experts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GradreelError, match=r"'layers\.2\.experts'.*stayed silent.*layout="):  # noqa: SIM117
        with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
            one_step(model, optimizer, batches[0], parts)


def one_step(model: Any, optimizer: Any, batch: Any, parts: Any) -> None:
    parts.loss(model, batch).backward()
    optimizer.step()


def test_compiled_while_recording(tmp_path: Path, make_model, batches, parts, notes) -> None:
    torch._dynamo.reset()
    frames = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="eager")):
        model = make_model()
        called = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = tmp_path / str(len(frames))
        with Recorder(path, called, optimizer, notify=notes.append):
            for batch in batches[:3]:
                one_step(called, optimizer, batch, parts)
                optimizer.zero_grad()
        frames.append(open_trace(path).routing().collect())
    assert frames[0].equals(frames[1])
