"""Momentum in the gradient buffer, through everything a training loop does to `.grad`."""

from __future__ import annotations

import gc
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toolkit.optim import RecipeOptimizer, clip_fresh_gradients
from traces.errors import GradreelError

BETA, LR = 0.5, 0.1


class Bank(nn.Module):
    """Experts [E, m, n] whose gradient is exactly what the caller asks for."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(3, 4, 5).to(dtype))
        self.dense = nn.Parameter(torch.randn(4, 5).to(dtype))

    def forward(self, wanted: Tensor) -> Tensor:
        return (self.experts * wanted).sum() + (self.dense * wanted[0]).sum()


def make(bank: Bank, **options: Any) -> RecipeOptimizer:
    groups = [
        {"params": [("experts", bank.experts)], "role": "routed_expert"},
        {"params": [("dense", bank.dense)], "role": "attention"},
    ]
    return RecipeOptimizer(groups, "mesh", lr=LR, beta=BETA, **options)


def wanted(step: int, idle: tuple[int, ...] = ()) -> Tensor:
    gradient = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(step))
    gradient[list(idle)] = 0
    return gradient


def buffer(optimizer: RecipeOptimizer, bank: Bank) -> Tensor:
    return optimizer.state[bank.experts]["buffer"]


def by_hand(steps: int, idle: tuple[int, ...] = ()) -> Tensor:
    """beta * (sum of decayed gradients) after `steps` steps; idle experts stand still."""
    total = torch.zeros(3, 4, 5)
    for step in range(steps):
        total = BETA * (total + wanted(step, idle))
    return total


def plain_run(steps: int, **options: Any) -> tuple[Bank, RecipeOptimizer]:
    bank = Bank()
    optimizer = make(bank, **options)
    for step in range(steps):
        bank(wanted(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return bank, optimizer


@pytest.mark.parametrize("mode", ["attached", "apart"])
def test_buffer_is_the_decayed_sum(mode: str) -> None:
    bank, optimizer = plain_run(5, hidden_momentum=mode)
    torch.testing.assert_close(buffer(optimizer, bank), by_hand(5))
    assert optimizer.pinned_gradient_bytes == 3 * 4 * 5 * 4
    assert optimizer.state_bytes == 0


def test_attached_equals_apart() -> None:
    assert torch.equal(
        plain_run(6, hidden_momentum="attached")[0].experts, plain_run(6, hidden_momentum="apart")[0].experts
    )


@pytest.mark.parametrize("mode", ["attached", "apart"])
@pytest.mark.parametrize("clear", ["module", "module zeros", "optimizer", "optimizer zeros", "by hand", "nobody"])
def test_zero_grad_of_anyone(clear: str, mode: str) -> None:
    reference, _ = plain_run(5)
    bank = Bank()
    optimizer = make(bank, hidden_momentum=mode)
    for step in range(5):
        bank(wanted(step)).backward()
        optimizer.step()
        match clear:
            case "module":
                bank.zero_grad()
            case "module zeros":
                bank.zero_grad(set_to_none=False)
            case "optimizer":
                optimizer.zero_grad()
            case "optimizer zeros":
                optimizer.zero_grad(set_to_none=False)
            case "by hand":
                bank.experts.grad = bank.dense.grad = None
        if clear == "nobody":
            bank.dense.grad = None
            if mode == "apart":
                bank.experts.grad = None
    assert torch.equal(bank.experts, reference.experts)
    torch.testing.assert_close(buffer(optimizer, bank), by_hand(5))


def test_grad_is_history_only_while_backward_runs() -> None:
    bank = Bank()
    optimizer = make(bank, hidden_momentum="attached")
    seen = []
    bank.experts.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    for step in range(3):
        assert bank.experts.grad is None
        bank(wanted(step)).backward()
        assert bank.experts.grad is None
        optimizer.step()
    assert optimizer.state[bank.experts]["buffer"].any()


def test_fresh_gradient_is_exact() -> None:
    # Inputs 1, 1, 0, 0: a recorder must see exactly these, never the decayed buffer 1, 1.5, 0.75, 0.375.
    bank = Bank()
    optimizer = make(bank)
    seen = []
    for value in (1.0, 1.0, 0.0, 0.0):
        bank(torch.full((3, 4, 5), value)).backward()
        fresh = optimizer.fresh_gradient(bank.experts)
        assert fresh is not None
        seen.append(fresh.clone())
        assert optimizer.fresh_gradient(bank.dense) is bank.dense.grad
        optimizer.step()
        optimizer.zero_grad()
    assert [float(g.unique()) for g in seen] == [1.0, 1.0, 0.0, 0.0]
    assert optimizer.fresh_gradient(bank.experts) is None


def test_watching_changes_nothing() -> None:
    reference, _ = plain_run(4)
    bank = Bank()
    optimizer = make(bank)
    for step in range(4):
        bank(wanted(step)).backward()
        torch.testing.assert_close(optimizer.fresh_gradient(bank.experts), wanted(step), rtol=0, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(bank.experts, reference.experts)


def test_fresh_gradient_that_was_not_kept() -> None:
    bank, optimizer = plain_run(2)
    bank(wanted(2)).backward()
    with pytest.raises(GradreelError, match="experts: its gradient was added onto the momentum buffer and not kept"):
        optimizer.fresh_gradient(bank.experts)
    optimizer.step()
    optimizer.track_fresh_gradients()
    bank(wanted(3)).backward()
    assert torch.equal(optimizer.fresh_gradient(bank.experts), wanted(3))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["attached", "apart"])
def test_accumulation_decays_once_a_step(mode: str) -> None:
    whole, parts = Bank(), Bank()
    one, four = make(whole, hidden_momentum=mode), make(parts, hidden_momentum=mode)
    four.track_fresh_gradients()
    for step in range(3):
        whole(wanted(step)).backward()
        for _ in range(4):
            parts(wanted(step) / 4).backward()
        torch.testing.assert_close(four.fresh_gradient(parts.experts), wanted(step))
        one.step()
        four.step()
        one.zero_grad()
        four.zero_grad()
    torch.testing.assert_close(buffer(four, parts), buffer(one, whole))
    torch.testing.assert_close(buffer(one, whole), by_hand(3))
    torch.testing.assert_close(parts.experts, whole.experts)


@pytest.mark.parametrize("mode", ["attached", "apart"])
def test_clipping_meets_the_fresh_gradient_only(mode: str) -> None:
    bank = Bank()
    optimizer = make(bank, hidden_momentum=mode)
    optimizer.track_fresh_gradients()
    total = torch.zeros(3, 4, 5)
    for step in range(4):
        bank(wanted(step)).backward()
        norm = clip_fresh_gradients(optimizer, 0.5)
        true = torch.sqrt(wanted(step).square().sum() + wanted(step)[0].square().sum())
        torch.testing.assert_close(norm, true)
        total = BETA * (total + wanted(step) * 0.5 / true)
        torch.testing.assert_close(bank.dense.grad, wanted(step)[0] * 0.5 / true, rtol=1e-4, atol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(buffer(optimizer, bank), total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["attached", "apart"])
def test_clipping_leaves_a_gradient_that_is_not_finite(mode: str) -> None:
    # Scaled by 1 / inf it would turn into NaN, and the other experts' history into zeros.
    bank, optimizer = plain_run(2, hidden_momentum=mode)
    optimizer.track_fresh_gradients()
    gradient = wanted(2)
    gradient[0, 0, 0] = torch.inf
    bank(gradient).backward()
    assert not torch.isfinite(clip_fresh_gradients(optimizer, 0.5))
    assert torch.equal(optimizer.fresh_gradient(bank.experts), gradient)  # type: ignore[arg-type]
    total = optimizer.grad_buffer(bank.experts)
    assert total is not None
    torch.testing.assert_close(total[1:], (by_hand(2) + gradient)[1:])


def test_who_did_not_ask_for_attachment_is_told_once() -> None:
    bank = Bank()
    optimizer = make(bank)
    bank(wanted(0)).backward()
    with pytest.warns(UserWarning, match=r"clip_grad_norm_ does not see them") as told:
        optimizer.step()
    assert [w.filename for w in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bank(wanted(1)).backward()
        optimizer.step()
        chosen = make(Bank(), hidden_momentum="attached")
        chosen.step()


def test_torch_clipping_does_not_touch_history() -> None:
    bank, optimizer = plain_run(5)
    before = buffer(optimizer, bank).clone()
    bank(wanted(5)).backward()
    norm = torch.nn.utils.clip_grad_norm_(bank.parameters(), 1e-3)
    torch.testing.assert_close(norm, wanted(5)[0].norm())
    torch.testing.assert_close(buffer(optimizer, bank), before + wanted(5))


def test_an_inf_step_under_grad_scaler_leaves_the_buffer() -> None:
    bank = Bank()
    optimizer = make(bank, hidden_momentum="apart")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in (0, -1, 1):
        optimizer.zero_grad()
        gradient = torch.full((3, 4, 5), torch.inf) if step < 0 else wanted(step)
        scaler.scale(bank(gradient)).backward()
        scaler.step(optimizer)
        scaler.update(256.0)
    torch.testing.assert_close(buffer(optimizer, bank), by_hand(2))


def test_grad_scaler_on_an_attached_buffer_is_an_error_at_once() -> None:
    bank = Bank()
    optimizer = make(bank, hidden_momentum="attached")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(bank(wanted(0))).backward()
    with pytest.raises(GradreelError, match="build the optimizer with hidden_momentum='apart'"):
        scaler.step(optimizer)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("inf_at", [0, 1, 3])
def test_auto_keeps_the_buffer_apart_from_a_grad_scaler(inf_at: int, unscale_first: bool) -> None:
    # A power of two changes no bit of a float32 gradient; the step that overflows leaves no trace.
    reference, _ = plain_run(4, hidden_momentum="apart")
    bank = Bank()
    optimizer = make(bank)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in sorted([*range(4), inf_at - 0.5]):
        optimizer.zero_grad()
        gradient = wanted(int(step)) if step == int(step) else torch.full((3, 4, 5), torch.inf)
        scaler.scale(bank(gradient)).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(256.0)
    assert torch.equal(bank.experts, reference.experts)
    torch.testing.assert_close(buffer(optimizer, bank), by_hand(4))
    # A checkpoint of such a run begins apart as well, though its buffer holds history.
    other = Bank()
    other.load_state_dict(bank.state_dict())
    again = make(other)
    again.load_state_dict(optimizer.state_dict())
    scaler.scale(other(wanted(4))).backward()
    scaler.step(again)
    torch.testing.assert_close(buffer(again, other), by_hand(5))


def test_a_grad_scaler_that_comes_late_is_an_error() -> None:
    bank, optimizer = plain_run(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(bank(wanted(2))).backward()
    with pytest.raises(GradreelError, match="build the optimizer with hidden_momentum='apart'"):
        scaler.step(optimizer)


def test_processes_that_come_between_building_and_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, _ = plain_run(3, hidden_momentum="apart")
    bank = Bank()
    optimizer, late, late_bank = make(bank), *plain_run(2)[::-1]
    for module in ("toolkit.optim._hidden", "toolkit.optim._optimizer"):
        monkeypatch.setattr(f"{module}.several_processes", lambda: True)
    for step in range(3):
        bank(wanted(step)).backward()
        assert bank.experts.grad is not None
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(bank.experts, reference.experts)
    late_bank(wanted(2)).backward()
    with pytest.raises(GradreelError, match="a process group was set up while hidden momentum is attached"):
        late.step()


@pytest.mark.parametrize("mode", ["attached", "apart", "auto"])
def test_grad_buffer_is_history_and_gradient(mode: str) -> None:
    bank = Bank()
    optimizer = make(bank, hidden_momentum=mode)
    for step in range(3):
        bank(wanted(step)).backward()
        total = optimizer.grad_buffer(bank.experts)
        assert total is not None
        torch.testing.assert_close(total, by_hand(step) + wanted(step))
        assert optimizer.grad_buffer(bank.dense) is bank.dense.grad
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["attached", "apart"])
def test_checkpoint_holds_the_buffer(mode: str) -> None:
    reference, _ = plain_run(8)
    bank, optimizer = plain_run(4, hidden_momentum=mode)
    file = io.BytesIO()
    torch.save((bank.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    assert state["state"][0]["buffer"].dtype == torch.float32
    other = Bank()
    other.load_state_dict(weights)
    again = make(other, hidden_momentum=mode)
    again.load_state_dict(state)
    for step in range(4, 8):
        other(wanted(step)).backward()
        again.step()
        again.zero_grad()
    assert torch.equal(other.experts, reference.experts)


def test_probe_backward() -> None:
    bank, optimizer = plain_run(3)
    before = buffer(optimizer, bank).clone()
    (probe,) = torch.autograd.grad(bank(wanted(9)), [bank.experts])
    assert torch.equal(probe, wanted(9))
    assert torch.equal(buffer(optimizer, bank), before)
    bank(wanted(9)).backward()
    with pytest.raises(
        GradreelError, match=r"zero_grad between backward and step .* use torch.autograd.grad for probes"
    ):
        optimizer.zero_grad()


@pytest.mark.parametrize("stepped", [True, False])
def test_a_probe_leaves_no_mark(stepped: bool) -> None:
    """torch.autograd.grad runs the parameter's hooks as backward does, but adds nothing."""
    bank, optimizer = plain_run(2, hidden_momentum="attached")
    optimizer.track_fresh_gradients()
    held, before = buffer(optimizer, bank).clone(), bank.experts.detach().clone()
    torch.autograd.grad(bank(wanted(9)), [bank.experts])
    assert bank.experts.grad is None
    assert optimizer.fresh_gradient(bank.experts) is None
    if stepped:
        bank(wanted(2, idle=(1,))).backward()
        assert torch.equal(optimizer.fresh_gradient(bank.experts), wanted(2, idle=(1,)))
        optimizer.step()
        assert torch.equal(bank.experts[1], before[1])  # present in the probe alone
        held = torch.where(torch.tensor([True, False, True])[:, None, None], BETA * (held + wanted(2)), held)
    else:
        optimizer.step()  # nothing came, nothing moves
        assert torch.equal(bank.experts, before)
    assert torch.allclose(buffer(optimizer, bank), held)


def test_apart_history_loaded_into_attached_is_known_to_be_history() -> None:
    """Otherwise the whole buffer would pass for the first step's own gradient."""
    saved = plain_run(2, hidden_momentum="apart")[1].state_dict()
    bank = Bank()
    optimizer = make(bank, hidden_momentum="attached")
    optimizer.load_state_dict(saved)
    bank(wanted(2)).backward()
    with pytest.raises(GradreelError, match="added onto the momentum buffer and not kept"):
        optimizer.fresh_gradient(bank.experts)


def test_create_graph_is_detected() -> None:
    bank, optimizer = plain_run(2)
    before = buffer(optimizer, bank).clone()
    with (
        pytest.raises(GradreelError, match="backward replaced the momentum buffer"),
        pytest.warns(UserWarning, match="create_graph"),
    ):
        (bank(wanted(2)) ** 2).backward(create_graph=True)
    assert torch.equal(buffer(optimizer, bank), before)


def test_a_gradient_set_by_hand_is_added() -> None:
    bank = Bank()
    optimizer = make(bank)
    for step in range(3):
        bank.experts.grad, bank.dense.grad = wanted(step), wanted(step)[0]
        optimizer.step()
    torch.testing.assert_close(buffer(optimizer, bank), by_hand(3))
    bank.experts.grad = wanted(3)
    with pytest.raises(GradreelError, match=r"experts: \.grad was set by hand"):
        bank(wanted(3)).backward()


@pytest.mark.parametrize("mode", ["attached", "apart"])
def test_idle_experts_stand_still(mode: str) -> None:
    bank, optimizer = plain_run(2, hidden_momentum=mode)
    before, history = bank.experts.detach().clone(), buffer(optimizer, bank).clone()
    for step in range(20):
        bank(wanted(step, idle=(1,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(bank.experts[1], before[1])
    assert torch.equal(buffer(optimizer, bank)[1], history[1])
    assert not torch.equal(bank.experts[0], before[0])


def test_an_expert_idle_in_one_micro_batch_only_is_present() -> None:
    bank = Bank()
    optimizer = make(bank)
    before = bank.experts.detach().clone()
    bank(wanted(0, idle=(1, 2))).backward()
    bank(wanted(1, idle=(0, 2))).backward()
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(bank.experts, before, strict=True)]
    assert moved == [True, True, False]


@pytest.mark.parametrize("mode", ["attached", "apart"])
def test_bfloat16_parameters_keep_a_float32_buffer(mode: str) -> None:
    # 0.99 is where a bfloat16 buffer is 17% wrong, 0.999 where it stalls.
    bank = Bank(torch.bfloat16)
    groups = [{"params": [("experts", bank.experts)], "role": "routed_expert"}]
    optimizer = RecipeOptimizer(groups, "mesh", lr=0.0, beta=0.999, hidden_momentum=mode)
    for _ in range(500):
        bank(torch.ones(3, 4, 5).to(torch.bfloat16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = buffer(optimizer, bank)
    assert held.dtype == torch.float32
    want = sum(0.999**k for k in range(1, 501))
    torch.testing.assert_close(held, torch.full_like(held, want), rtol=1e-4, atol=0)


def test_a_new_optimizer_takes_over() -> None:
    bank, first = plain_run(2)
    second = make(bank)
    bank(wanted(5)).backward()
    second.step()
    torch.testing.assert_close(buffer(second, bank), BETA * wanted(5))
    torch.testing.assert_close(buffer(first, bank), by_hand(2))


def test_a_dropped_optimizer_lets_go() -> None:
    bank, optimizer = plain_run(2)
    del optimizer
    gc.collect()
    bank(wanted(0)).backward()
    assert torch.equal(bank.experts.grad, wanted(0))  # type: ignore[arg-type]


def test_compiled_model() -> None:
    reference, _ = plain_run(3)
    bank = Bank()
    optimizer = make(bank)
    compiled = torch.compile(bank, backend="aot_eager")
    for step in range(3):
        compiled(wanted(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(bank.experts, reference.experts)
    torch.testing.assert_close(buffer(optimizer, bank), by_hand(3))


def test_attached_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(GradreelError, match="experts: hidden_momentum is 'attached' with several processes"):
        make(Bank(), hidden_momentum="attached", maximize=True)


def test_a_refused_group_leaves_no_hook() -> None:
    _, optimizer = plain_run(1, hidden_momentum="attached")
    good, bad = nn.Parameter(torch.ones(3, 4, 5)), nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(GradreelError, match="complex64"):
        optimizer.add_param_group({"params": [("good", good), ("bad", bad)], "role": "routed_expert"})
    good.sum().backward()
    assert torch.equal(good.grad, torch.ones(3, 4, 5))
    assert good not in optimizer.state
    optimizer.zero_grad()
