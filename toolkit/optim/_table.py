"""Which parameters an optimizer serves by which chain, as text a person can check before training."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.recipes import Recipe
from traces.views import ParamInfo


def assignment_table(recipe: Recipe, rated: Iterable[tuple[ParamInfo, float]]) -> str:
    """One line per role and chain: parameters, elements, the group's lr, the chain's stages in order.

    `rated` gives every parameter once, with the lr of its group. A chain's own `lr_scale` is shown behind the lr.
    """
    lines: dict[tuple[str, str, str], list[int]] = {}
    for info, lr in rated:
        chain = recipe.chain_for(info)
        rate = f"{lr:.4g}" + (f" x {chain.lr_scale:g}" if chain.lr_scale != 1 else "")
        key = (info.role, rate, " > ".join(stage.name for stage in chain))
        count = lines.setdefault(key, [0, 0])
        count[0] += 1
        count[1] += info.numel
    head = ("role", "params", "elements", "lr", "chain")
    rows = [(role, f"{n:,}", f"{size:,}", rate, stages) for (role, rate, stages), (n, size) in lines.items()]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(4)]
    texts = [
        "  ".join((r[0].ljust(widths[0]), r[1].rjust(widths[1]), r[2].rjust(widths[2]), r[3].ljust(widths[3]), r[4]))
        for r in (head, *rows)
    ]
    return "\n".join((f"optimizer {recipe.name}", *texts))
