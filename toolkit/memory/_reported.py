"""Accuracy that papers report for recipes of this project. Nothing here was measured by this project."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reported:
    """One figure: `value` as its source prints it, of `recipe` (a family's name) in the experiment `setting`."""

    recipe: str
    value: str
    setting: str
    source: str


_SKEWADAM = "validation perplexity, 6.78B, 10,000 steps of OpenWebText, one seed"
_MESH = "validation loss, nanowhale-110m, 5,000 steps of FineWeb-Edu, 3 seeds"

REPORTED = (
    Reported("skewadam", "108.4", _SKEWADAM, "arXiv 2607.19058"),
    Reported("adamw", "126.8 (118.5 tuned)", _SKEWADAM, "arXiv 2607.19058"),
    Reported("muon", "120.2", _SKEWADAM, "arXiv 2607.19058"),
    Reported("adafactor", "149.5", _SKEWADAM, "arXiv 2607.19058"),
    Reported("lion", "393.7", _SKEWADAM, "arXiv 2607.19058"),
    Reported("galore", "1840", _SKEWADAM, "arXiv 2607.19058"),
    Reported("adamw", "3.59", _MESH, "arXiv 2608.04407"),
    Reported("mesh", "3.64", _MESH, "arXiv 2608.04407"),
    Reported("sage_sinkhorn", "3.8265", _MESH, "arXiv 2608.04407"),
)


def reported_for(recipe: str) -> list[Reported]:
    """What papers report for a recipe; a variant (`mesh+sign_only`) has no figures, since it is another optimizer."""
    name = recipe.split("(")[0]
    return [] if "+" in recipe else [figure for figure in REPORTED if figure.recipe == name]
