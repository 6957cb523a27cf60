"""Another place for eps in the second moment."""

from __future__ import annotations

from toolkit.recipes import Recipe
from toolkit.recipes._checks import one_of, positive
from toolkit.stages import Chain
from toolkit.stages.second_moment import EPS_MODES
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows, replace_stage


def change(recipe: Recipe, mode: str, eps: float | None = None, rows: str = "experts") -> Recipe:
    """`v_floor`, `add_to_sqrt` or `adafactor`, with another `eps` if given: its units differ between the modes."""
    one_of("eps_mode", mode, EPS_MODES)
    options = {"eps_mode": mode}
    if eps is not None:
        positive("eps", eps)

    def edit(chain: Chain) -> Chain:
        more = {} if eps is None else {"eps": eps}
        for name in ("second_moment", "factored_second_moment"):
            chain = replace_stage(chain, name, lambda s: s.with_options(**options, **more))
        return chain

    return changed(recipe, edit_rows(recipe, rows, edit), "eps_mode", "it needs a second moment with another eps_mode")


VARIANT = Variant(
    "eps_mode", change, "eps_mode(v_floor), eps_mode(adafactor, 1e-30)", "where eps stands in the second moment"
)
