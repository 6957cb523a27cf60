"""Accuracy that papers report for recipes of this project. Nothing here was measured by this project."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Reported:
    """One figure: `value` as its source prints it, of `recipe` (a family's name) in the experiment `setting`."""

    recipe: str
    value: str
    setting: str
    source: str


_SKEWADAM = "validation perplexity, 6.78B, 10,000 steps of OpenWebText, one seed"
_TIERS = "validation perplexity, 6.78B, 10,000 steps on another GPU, where the full tiers gave 108.9, one seed"
_MESH = "validation loss, nanowhale-110m, 5,000 steps of FineWeb-Edu, 3 seeds"

REPORTED = (
    Reported("skewadam", "108.4", _SKEWADAM, "arXiv 2607.19058"),
    Reported("adamw", "126.8 (118.5 tuned)", _SKEWADAM, "arXiv 2607.19058"),
    Reported("muon", "120.2", _SKEWADAM, "arXiv 2607.19058"),
    Reported("adafactor", "149.5", _SKEWADAM, "arXiv 2607.19058"),
    Reported("lion", "393.7", _SKEWADAM, "arXiv 2607.19058"),
    Reported("galore", "1840", _SKEWADAM, "arXiv 2607.19058"),
    Reported("skewadam(tiers=expert_momentum)", "108.7", _TIERS, "arXiv 2607.19058"),
    Reported("skewadam(tiers=factored_router)", "108.2", _TIERS, "arXiv 2607.19058"),
    Reported("skewadam(tiers=uniform)", "108.3", _TIERS, "arXiv 2607.19058"),
    Reported("adamw", "3.59", _MESH, "arXiv 2608.04407"),
    Reported("mesh", "3.64", _MESH, "arXiv 2608.04407"),
    Reported("sage_sinkhorn", "3.8265", _MESH, "arXiv 2608.04407"),
)


#: Options that make a recipe more like the paper's own, so that its figures still belong to it.
_ITS_OWN = {"paper_exact", "compat", "lr", "rank", "refresh", "side"}


def reported_for(recipe: str) -> list[Reported]:
    """What papers report for a recipe. A variant, or an option that no paper ran, is another optimizer: no figures."""
    family, _, options = recipe.partition("(")
    names = set(re.findall(r"(\w+)\s*=", options))
    if "+" in recipe or not names <= {*_ITS_OWN, "tiers"}:
        return []
    tiers = re.search(r"tiers\s*=\s*['\"]?(\w+)", options)
    wanted = family if tiers is None or tiers.group(1) == "full" else f"{family}(tiers={tiers.group(1)})"
    return [figure for figure in REPORTED if figure.recipe == wanted]
