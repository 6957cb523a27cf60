"""Which frozen chains one fused kernel serves.

The chain is the truth. A kernel rounds in other places, so it runs only where it was asked for (`Stepper(fused=True)`),
only for float32 arithmetic on CPU matrices, and never where somebody wants to see the direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from toolkit.kernels import SkewAdamRule, SkewAdamState, mesh_step, sign_step, skewadam_step, sr_sinkhorn_apply
from toolkit.stages import Chain, Context
from toolkit.stages._shapes import is_matrix

Options = Mapping[str, Any]
#: Takes the gradient, the chain's slots and the context; steps weight and slots in place.
FusedStep = Callable[[Tensor, Mapping[str, Tensor], Context], None]


def _sinkgd(sinkhorn: Options, end: Options) -> FusedStep:
    def step(x: Tensor, slots: Mapping[str, Tensor], ctx: Context) -> None:
        sr_sinkhorn_apply(
            ctx.weight,
            x,
            ctx.lr,
            sinkhorn["sweeps"],
            decay=ctx.lr * end["weight_decay"],
            compat=sinkhorn["compat"],
            rounding=end["rounding"],
            rng=ctx.rng,
        )

    return step


def _sign(sign: Options, end: Options) -> FusedStep:
    def step(x: Tensor, slots: Mapping[str, Tensor], ctx: Context) -> None:
        decay, rounding = end["weight_decay"], end["rounding"]
        sign_step(ctx.weight, x, lr=ctx.lr, weight_decay=decay, rounding=rounding, rng=ctx.rng)

    return step


def _mesh(hidden: Options, sinkhorn: Options, end: Options) -> FusedStep:
    def step(x: Tensor, slots: Mapping[str, Tensor], ctx: Context) -> None:
        mesh_step(
            ctx.weight,
            slots["buffer"],
            None if ctx.gradient_in_buffer else x,
            lr=ctx.lr,
            beta=hidden["beta"],
            sweeps=sinkhorn["sweeps"],
            weight_decay=end["weight_decay"],
            rounding=end["rounding"],
            rng=ctx.rng,
            compat=sinkhorn["compat"],
        )

    return step


def _skewadam(moment: Options, *rest: Options) -> FusedStep | None:
    *smooth, clip, end = rest
    if moment["power"] is not None or moment["correct"] == "none" or (smooth and smooth[0] != smooth[1]):
        return None
    rule = SkewAdamRule(
        betas=(smooth[0]["beta"] if smooth else 0.0, moment["beta"]),
        eps=moment["eps"],
        eps_row=moment.get("eps_row", moment["eps"]),
        eps_mode=moment["eps_mode"],
        correct=moment["correct"],
        threshold=clip["threshold"],
        clip_scope=clip["clip_scope"],
        weight_decay=end["weight_decay"],
        decay=end["decay"],
        rounding=end["rounding"],
    )

    def step(x: Tensor, slots: Mapping[str, Tensor], ctx: Context) -> None:
        state = SkewAdamState(**{name: slots.get(name) for name in SkewAdamState.__dataclass_fields__})
        skewadam_step(ctx.weight, x, state, step=int(ctx.step), lr=ctx.lr, rule=rule, rng=ctx.rng)

    return step


_SMOOTHED = ("ema", "unbias", "rms_clip", "apply")
#: Names of a chain's stages -> the kernel's name, and what builds its step from the stages' options.
FUSED: dict[tuple[str, ...], tuple[str, Callable[..., FusedStep | None]]] = {
    ("sr_sinkhorn", "apply"): ("sr_sinkhorn", _sinkgd),
    ("sign", "apply"): ("sign_step", _sign),
    ("hidden_ema", "sr_sinkhorn", "apply"): ("mesh_step", _mesh),
    ("factored_second_moment", "rms_clip", "apply"): ("skewadam_step", _skewadam),
    ("factored_second_moment", *_SMOOTHED): ("skewadam_step", _skewadam),
    ("second_moment", "rms_clip", "apply"): ("skewadam_step", _skewadam),
    ("second_moment", *_SMOOTHED): ("skewadam_step", _skewadam),
}


def fused_step(chain: Chain) -> tuple[str, FusedStep] | None:
    """(kernel, its step) that does what the chain does; None where no kernel does."""
    name, build = FUSED.get(tuple(stage.name for stage in chain), ("", None))
    options = [stage.options for stage in chain]
    own_dtype = options[-1].get("decay") == "own_dtype" and options[-1].get("weight_decay")
    forced = any(option.get("backend") for option in options)
    if build is None or forced or (own_dtype and name != "skewadam_step"):
        return None
    step = build(*options)
    return None if step is None else (name, step)


def can_run(name: str, x: Tensor, slots: Mapping[str, Tensor], ctx: Context) -> bool:
    """Whether the kernel takes these tensors: float32 in CPU memory, contiguous state, one step count for all."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and ctx.weight.dtype in (torch.float32, torch.bfloat16)
        and isinstance(ctx.step, int)
        and all(slot.is_contiguous() for slot in slots.values())
        and (name == "sign_step" or is_matrix(x, ctx))
    )
