"""Recipes against the same optimizer of a well-kept library."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch

from toolkit.recipes import Stepper
from toolkit.variants import recipe
from traces.views import ParamInfo

STEPS = 20


def follow(name: str, shape: tuple[int, ...], theirs: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after 20 steps of both on the same gradients: ours and theirs."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(shape))
    weight = parameter.detach().clone()
    optimizer = theirs([parameter])
    axes = (0, 1) if len(shape) == 2 else None
    stepper = Stepper(recipe(name, **options), ParamInfo("p", "attention", shape, matrix_axes=axes))
    for step in range(STEPS):
        parameter.grad = torch.randn(shape) * (100.0 if step == 7 else 1.0)
        stepper.step(weight, parameter.grad, lr=optimizer.param_groups[0]["lr"])
        optimizer.step()
    return weight, parameter.detach()


@pytest.mark.parametrize("shape", [(9, 5), (7,)])
def test_adafactor_of_torch(shape: tuple[int, ...]) -> None:
    # torch multiplies by max(1e-3, RMS(W)) always, and bounds lr by 1 / sqrt(t), which 0.01 never meets here.
    ours, theirs = follow(
        "adafactor",
        shape,
        lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.05),
        scale_parameter=True,
        weight_decay=0.05,
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(9, 5), (7,)])
def test_lion_of_pytorch_optimizer(shape: tuple[int, ...]) -> None:
    ours, theirs = follow(
        "lion", shape, lambda p: pytorch_optimizer.Lion(p, lr=0.01, weight_decay=0.05), weight_decay=0.05
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_adafactor_of_pytorch_optimizer() -> None:
    ours, theirs = follow(
        "adafactor",
        (9, 5),
        lambda p: pytorch_optimizer.AdaFactor(
            p, lr=0.01, betas=(None, 0.999), relative_step=False, scale_parameter=False
        ),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_galore_of_pytorch_optimizer() -> None:
    projection = {"rank": 2, "update_proj_gap": 1000, "scale": 0.25, "projection_type": "std"}
    # One basis for the whole run: the two count the steps between renewals from 1 and from 0.
    ours, theirs = follow(
        "galore",
        (6, 9),
        lambda p: pytorch_optimizer.GaLore([{"params": p, **projection}], lr=0.01, eps=1e-8),
        rank=2,
        refresh=1000,
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
