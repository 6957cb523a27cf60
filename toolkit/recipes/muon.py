"""Muon: momentum, orthogonalised matrix by matrix."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import _checks
from toolkit.recipes._recipe import ONE_D, REST, IdlePolicy, Recipe, RecipeFamily, interval
from toolkit.recipes._tables import adam_chain
from toolkit.stages import chain
from toolkit.stages._make import stage
from toolkit.stages.newton_schulz import DTYPES, SCALES


@dataclass(frozen=True)
class MuonOptions:
    """`compat="study"` is the SkewAdam study's form: 3 sweeps in bfloat16, no scale, no Nesterov, no decay, and Adam
    at 0.001 for the rest. It sets whatever is left at None; `compat="original"` sets Jordan's values.
    """

    lr: float = 2e-2
    momentum: float = 0.95
    compat: str = "original"
    nesterov: bool | None = None
    sweeps: int | None = None
    scale: str | None = None
    dtype: str | None = None
    weight_decay: float | None = None
    adam_lr: float = 1e-3
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    idle: IdlePolicy = "skip"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        _checks.one_of("compat", self.compat, ("original", "study"))
        study = self.compat == "study"
        defaults = {
            "nesterov": not study,
            "sweeps": 3 if study else 5,
            "scale": "none" if study else "original",
            "dtype": "bfloat16" if study else "float32",
            "weight_decay": 0.0 if study else 0.01,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        interval("momentum", self.momentum, 0.0, 1.0, open_high=True)
        _checks.whole("sweeps", self.sweeps)  # type: ignore[arg-type]
        _checks.one_of("scale", self.scale, SCALES)
        _checks.one_of("dtype", self.dtype, DTYPES)
        _checks.positive("adam_lr", self.adam_lr)
        _checks.betas("adam_betas", self.adam_betas)
        _checks.positive("adam_eps", self.adam_eps)


def build(options: MuonOptions) -> Recipe:
    """Muon on every matrix but vocabulary and router; AdamW on those and on 1-D parameters, at `adam_lr`."""
    muon = chain(
        stage("heavy_ball", beta=options.momentum, nesterov=options.nesterov),
        stage("newton_schulz", sweeps=options.sweeps, scale=options.scale, dtype=options.dtype),
        stage("apply", weight_decay=options.weight_decay, rounding=options.rounding),
    )
    adam = adam_chain(
        betas=options.adam_betas,
        eps=options.adam_eps,
        weight_decay=float(options.weight_decay or 0.0),
        rounding=options.rounding,
        lr_scale=options.adam_lr / options.lr if options.lr else 1.0,
    )
    groups = {"routed_expert": muon, "embedding": adam, "head": adam, "router": adam, ONE_D: adam, REST: muon}
    return Recipe(
        name="muon",
        groups=groups,
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 8.0, "ours": 4.0 if options.nesterov else 3.0},
    )


RECIPE = RecipeFamily(
    name="muon",
    options=MuonOptions,
    build=build,
    paper="Jordan et al. 2024",
    summary="orthogonalised momentum per expert matrix, AdamW on vocabulary, router and 1-D",
    checked_against="torch.optim.Muon; a golden run of the SkewAdam study's Muon; a float64 loop",
    rate="as published; 0.001 on what AdamW serves; share 1.11",
)
