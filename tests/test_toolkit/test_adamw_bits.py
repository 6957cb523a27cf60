"""The adamw recipe against torch's own, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from toolkit.recipes import Stepper
from toolkit.variants import recipe
from traces.views import ParamInfo

SHAPES = {
    "scalar": ((), None, None),
    "vector": ((7,), None, None),
    "matrix": ((33, 47), None, (0, 1)),
    "experts": ((3, 19, 23), 0, (1, 2)),
    "experts transposed": ((3, 16, 24), 0, (2, 1)),
    "experts in the middle": ((8, 3, 5), 1, (0, 2)),
    "convolution": ((4, 3, 5, 2), None, (0, 1)),
}


@pytest.mark.parametrize("foreach", [False, True], ids=["single-tensor", "foreach"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_of_torch(shape: str, foreach: bool, dtype: torch.dtype) -> None:
    size, expert_axis, matrix_axes = SHAPES[shape]
    torch.manual_seed(len(size))
    parameter = torch.nn.Parameter(torch.randn(size, dtype=dtype))
    weight = parameter.detach().clone()
    other = torch.nn.Parameter(torch.randn(11, dtype=dtype))
    options = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([other, parameter], foreach=foreach, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 25)
    info = ParamInfo(
        "p", "other", size, str(dtype).removeprefix("torch."), expert_axis=expert_axis, matrix_axes=matrix_axes
    )
    stepper = Stepper(recipe("adamw", **options), info)
    for step in range(25):
        gradient = torch.randn(size, dtype=dtype) * 10.0 ** (step % 5 - 2)
        other.grad = torch.ones_like(other)
        parameter.grad = None if step == 4 else gradient.clone()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        stepper.step(weight, None if step == 4 else gradient, lr=rate)
        assert torch.equal(weight, parameter.detach()), f"step {step + 1}"
    state = optimizer.state[parameter]
    restore = stepper.layout.restore
    assert torch.equal(restore(stepper.state["momentum"]), state["exp_avg"])
    assert torch.equal(restore(stepper.state["second_moment"]), state["exp_avg_sq"])
    assert int(stepper.state["step"]) == int(state["step"]) == 24


def test_channels_last_strides() -> None:
    torch.manual_seed(0)
    start = torch.randn(4, 3, 5, 7).to(memory_format=torch.channels_last)
    parameter, weight = torch.nn.Parameter(start.clone()), start.clone()
    optimizer = torch.optim.AdamW([parameter], lr=1e-2)
    info = ParamInfo("p", "other", (4, 3, 5, 7), matrix_axes=(0, 1), strides=tuple(start.stride()))
    stepper = Stepper(recipe("adamw", lr=1e-2), info)
    for _ in range(5):
        parameter.grad = torch.randn_like(start)
        stepper.step(weight, parameter.grad, lr=1e-2)
        optimizer.step()
        assert torch.equal(weight, parameter.detach())


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}])
def test_sgd_follows_torch(options: dict[str, float]) -> None:
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(9, 5))
    weight = parameter.detach().clone()
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False, **options)
    stepper = Stepper(recipe("sgd", **options), ParamInfo("p", "other", (9, 5), matrix_axes=(0, 1)))
    for _ in range(10):
        parameter.grad = torch.randn(9, 5)
        stepper.step(weight, parameter.grad, lr=0.1)
        optimizer.step()
    assert torch.equal(weight, parameter.detach())


def test_update_is_the_direction_before_lr() -> None:
    torch.manual_seed(2)
    weight = torch.randn(6, 4)
    stepper = Stepper(recipe("adamw", weight_decay=0.0), ParamInfo("p", "other", (6, 4), matrix_axes=(0, 1)))
    weights = [weight.clone()]
    for rate in (0.1, 0.01):
        update = stepper.step(weight, torch.randn(6, 4), lr=rate, want_update=True)
        weights.append(weight.clone())
        before, after = list(pairwise(weights))[-1]
        torch.testing.assert_close(after, before - rate * update)
