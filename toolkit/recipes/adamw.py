"""AdamW, bit for bit as torch computes it."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import REST, IdlePolicy, Recipe, RecipeFamily
from toolkit.recipes._tables import adam_chain


@dataclass(frozen=True)
class AdamWOptions:
    """Switches and defaults of `torch.optim.AdamW`."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    idle: IdlePolicy = "as_zero"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        _checks.betas("betas", self.betas)
        _checks.positive("eps", self.eps)


def build(options: AdamWOptions) -> Recipe:
    """One chain for every role."""
    table = adam_chain(
        betas=options.betas, eps=options.eps, weight_decay=options.weight_decay, rounding=options.rounding
    )
    return Recipe(
        name="adamw",
        groups={REST: table},
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 7.0, "ours": 1.0},
    )


RECIPE = RecipeFamily(
    name="adamw",
    options=AdamWOptions,
    build=build,
    paper="arXiv 1711.05101",
    summary="Adam with decoupled weight decay, on every role",
    checked_against="torch.optim.AdamW, single-tensor and foreach, bit for bit",
    rate="torch's own; 2.44 nats per byte",
)
