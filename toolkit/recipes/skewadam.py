"""SkewAdam: as much state as each tier is said to need."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import ONE_D, REST, IdlePolicy, Recipe, RecipeFamily
from toolkit.stages import Chain, chain
from toolkit.stages._make import stage
from toolkit.stages.rms_clip import CLIP_SCOPES
from toolkit.stages.second_moment import EPS_MODES

#: The tier ablation of the paper: experts with momentum too, a factored router, all tiers as the backbone.
TIERS = ("full", "expert_momentum", "factored_router", "uniform")


@dataclass(frozen=True)
class SkewAdamOptions:
    """`paper_exact=True` sets every switch left at None as the original code behaves, otherwise as corrected.

    None means: eps_mode v_floor / add_to_sqrt, correct after / before, clip_scope tensor / matrix, decay own_dtype /
    fused, rounding dither / stochastic, decay_1d True / False, idle as_zero in both (paper / corrected).
    `eps_row` floors the ratio of a row to the mean row, `eps` the columns (in squared units under v_floor).
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    eps_row: float = 1e-8
    weight_decay: float = 0.05
    router_weight_decay: float = 0.0
    threshold: float = 1.0
    tiers: str = "full"
    paper_exact: bool = False
    eps_mode: str | None = None
    correct: str | None = None
    clip_scope: str | None = None
    decay: str | None = None
    rounding: str | None = None
    decay_1d: bool | None = None
    idle: IdlePolicy = "as_zero"

    def __post_init__(self) -> None:
        exact = self.paper_exact
        defaults = {
            "eps_mode": "v_floor" if exact else "add_to_sqrt",
            "correct": "after" if exact else "before",
            "clip_scope": "tensor" if exact else "matrix",
            "decay": "own_dtype" if exact else "fused",
            "rounding": "dither" if exact else "stochastic",
            "decay_1d": exact,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        _checks.not_negative("router_weight_decay", self.router_weight_decay)
        _checks.betas("betas", self.betas)
        for name in ("eps", "eps_row", "threshold"):
            _checks.positive(name, getattr(self, name))
        _checks.one_of("tiers", self.tiers, TIERS)
        _checks.one_of("eps_mode", self.eps_mode, EPS_MODES)
        _checks.one_of("correct", self.correct, ("before", "after"))
        _checks.one_of("clip_scope", self.clip_scope, CLIP_SCOPES)
        _checks.one_of("decay", self.decay, ("fused", "own_dtype"))


def tier(options: SkewAdamOptions, *, momentum: bool, factored: bool, weight_decay: float) -> Chain:
    """One tier: second moment (factored or full), momentum or none, RMS clip."""
    moment = {"beta": options.betas[1], "eps": options.eps, "eps_mode": options.eps_mode, "correct": options.correct}
    if factored:
        stages = [stage("factored_second_moment", eps_row=options.eps_row, **moment)]
    else:
        stages = [stage("second_moment", **moment)]
    if momentum:
        stages += [stage("ema", beta=options.betas[0]), stage("unbias", beta=options.betas[0])]
    return chain(
        *stages,
        stage("rms_clip", threshold=options.threshold, clip_scope=options.clip_scope),
        stage("apply", weight_decay=weight_decay, decay=options.decay, rounding=options.rounding),
    )


def build(options: SkewAdamOptions) -> Recipe:
    """Factored and momentum-free experts, a full router, momentum in the backbone; `tiers` changes that."""
    uniform = options.tiers == "uniform"
    expert_momentum = uniform or options.tiers == "expert_momentum"
    router_factored = uniform or options.tiers == "factored_router"
    decay_1d = options.weight_decay if options.decay_1d else 0.0
    wd, router_wd = options.weight_decay, options.router_weight_decay
    router_1d = router_wd if options.decay_1d else 0.0
    groups = {
        "routed_expert": tier(options, momentum=expert_momentum, factored=True, weight_decay=wd),
        f"routed_expert/{ONE_D}": tier(options, momentum=expert_momentum, factored=False, weight_decay=decay_1d),
        "router": tier(options, momentum=uniform, factored=router_factored, weight_decay=router_wd),
        f"router/{ONE_D}": tier(options, momentum=uniform, factored=False, weight_decay=router_1d),
        ONE_D: tier(options, momentum=True, factored=False, weight_decay=decay_1d),
        REST: tier(options, momentum=True, factored=True, weight_decay=wd),
    }
    return Recipe(
        name="skewadam",
        groups=groups,
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 6.0, "ours": 1.0},
    )


RECIPE = RecipeFamily(
    name="skewadam",
    options=SkewAdamOptions,
    build=build,
    paper="arXiv 2607.19058",
    summary="factored experts without momentum, full router, momentum in the backbone; paper_exact keeps the quirks",
    checked_against="22 golden runs of the original code",
    rate="as published; share 0.85",
)
