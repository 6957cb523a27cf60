"""Adafactor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.recipes import _checks
from toolkit.recipes._recipe import ONE_D, REST, IdlePolicy, Recipe, RecipeFamily, interval
from toolkit.stages import Chain, chain
from toolkit.stages._make import stage
from toolkit.stages.rms_clip import CLIP_SCOPES


@dataclass(frozen=True)
class AdafactorOptions:
    """`power` is the exponent of the moment's decay 1 - t^-power. With `relative_step` give lr 1."""

    lr: float = 1e-3
    power: float = 0.8
    eps: float = 1e-30
    threshold: float = 1.0
    clip_scope: str = "matrix"
    scale_parameter: bool = False
    smallest_scale: float = 1e-3
    relative_step: bool = False
    weight_decay: float = 0.0
    idle: IdlePolicy = "as_zero"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        interval("power", self.power, 0.0, 1.0, open_low=True)
        for name in ("eps", "threshold", "smallest_scale"):
            _checks.positive(name, getattr(self, name))
        _checks.one_of("clip_scope", self.clip_scope, CLIP_SCOPES)


def _chain(options: AdafactorOptions, moment: str) -> Chain:
    extras: list[Any] = []
    if options.scale_parameter:
        extras.append(stage("parameter_scale", smallest=options.smallest_scale))
    if options.relative_step:
        extras.append(stage("relative_step"))
    return chain(
        stage(moment, eps=options.eps, eps_mode="adafactor", correct="none", power=options.power),
        stage("rms_clip", threshold=options.threshold, clip_scope=options.clip_scope),
        *extras,
        stage("apply", weight_decay=options.weight_decay, rounding=options.rounding),
    )


def build(options: AdafactorOptions) -> Recipe:
    """Factored moments on matrices, full ones on 1-D parameters, no momentum."""
    groups = {ONE_D: _chain(options, "second_moment"), REST: _chain(options, "factored_second_moment")}
    return Recipe(
        name="adafactor",
        groups=groups,
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 4.0, "ours": 2.0 if options.scale_parameter or options.relative_step else 1.0},
    )


RECIPE = RecipeFamily(
    name="adafactor",
    options=AdafactorOptions,
    build=build,
    paper="arXiv 1804.04235",
    summary="factored second moment, clipped update, no momentum, on every role",
    checked_against="torch.optim.Adafactor; golden runs of transformers.Adafactor; a float64 loop",
    rate="AdamW's, since relative steps are off; share 1.06",
)
