"""The table of recipes that the README shows, made from the recipes themselves."""

from __future__ import annotations

from toolkit.recipes._recipe import RecipeFamily
from toolkit.stages import Chain
from traces.views import ParamInfo

#: Column title -> a parameter that stands for the roles in it.
_COLUMNS = {
    "routed experts": ParamInfo("p", "routed_expert", (2, 3, 5), expert_axis=0, num_experts=2, matrix_axes=(1, 2)),
    "other matrices": ParamInfo("p", "attention", (3, 5), matrix_axes=(0, 1)),
    "embedding, head": ParamInfo("p", "embedding", (3, 5), matrix_axes=(0, 1)),
    "router": ParamInfo("p", "router", (3, 5), matrix_axes=(0, 1)),
    "1-D": ParamInfo("p", "norm", (5,)),
}


def overview() -> str:
    """Markdown, one row per recipe: name, paper, slots per role, lr, what it is checked against."""
    from toolkit.recipes import RECIPES

    titles = ["recipe", "paper", *(f"state: {column}" for column in _COLUMNS), "lr", "checked against"]
    lines = [titles, ["---"] * len(titles), *(_row(family) for family in RECIPES.all())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(family: RecipeFamily) -> list[str]:
    built = family()
    states = [_slots(built.chain_for(info)) for info in _COLUMNS.values()]
    return [f"`{family.name}`", family.paper, *states, f"{built.lr:g}", family.checked_against]


def _slots(chain: Chain) -> str:
    names = [key.replace("_", " ") + (" (in `.grad`)" if s.home == "grad_buffer" else "") for key, s in chain.slots()]
    return ", ".join(names) or "none"
