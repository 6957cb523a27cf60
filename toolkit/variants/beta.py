"""Another decay of the momentum."""

from __future__ import annotations

from toolkit.recipes import Recipe, interval
from toolkit.stages import Chain
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows, replace_stage
from traces.errors import GradreelError

_MOMENTA = ("ema", "unbias", "hidden_ema", "heavy_ball", "snr")


def change(recipe: Recipe, beta: float, rows: str = "experts") -> Recipe:
    """Momentum with `beta`, wherever the chain keeps it (and its bias correction)."""
    if isinstance(beta, bool) or not isinstance(beta, (int, float)):
        raise GradreelError(f"beta is {beta!r}; allowed: numbers in [0, 1)")
    interval("beta", beta, 0.0, 1.0, open_high=True)

    def edit(chain: Chain) -> Chain:
        for name in _MOMENTA:
            chain = replace_stage(chain, name, lambda s: s.with_options(beta=beta))
        return chain

    return changed(recipe, edit_rows(recipe, rows, edit), "beta", "it needs a momentum stage with another beta")


VARIANT = Variant("beta", change, "beta(0.95)", "another decay of the routed experts' momentum")
