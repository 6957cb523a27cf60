"""What each recipe keeps in memory: optimizer state and pinned gradient, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots._plot import Plot
from toolkit.plots._select import tidy
from toolkit.plots._theme import SOFT, Width, family_colour, new_figure, recipe_order, say_empty, text, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = ("state_bytes", "pinned_gradient_bytes")
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def readable_bytes(count: float) -> str:
    """`count` bytes with a binary unit, three significant digits: `1.50 MiB`."""
    for unit, size in _UNITS:
        if abs(count) >= size or unit == "B":
            number = count / size
            digits = 0 if unit == "B" or number >= 100 else 1 if number >= 10 else 2
            return f"{number:.{digits}f} {unit}"
    raise AssertionError


def memory_table(frame: pl.DataFrame) -> pl.DataFrame:
    """`recipe`, `state_bytes`, `pinned_gradient_bytes` (bytes over all parameters; null where undefined).

    Rows per parameter are added up; of several steps the largest counts. Rows of the whole run (no parameter) are used
    where there are none per parameter.
    """
    frame = tidy(frame)
    rows = frame.filter(
        pl.col("metric").is_in(_KINDS) & (pl.col("flag") == "") & pl.col("value").is_finite().fill_null(False)
    )
    single = ["recipe", "metric", "run", "arm", "seed", "param", "role", "layer", "expert"]
    largest = rows.group_by(single).agg(pl.col("value").max())
    whole = pl.col("param").is_null()
    per_param = largest.filter(~whole)
    extra = largest.filter(whole).join(
        per_param.select("recipe", "metric").unique(), on=["recipe", "metric"], how="anti"
    )
    runs = ["recipe", "metric", "run", "arm", "seed"]
    total = pl.concat([per_param, extra]).group_by(runs).agg(pl.col("value").sum())
    mean = total.group_by("recipe", "metric").agg(pl.col("value").mean())
    order = recipe_order(rows["recipe"].unique().to_list())
    values = {(recipe, metric): value for recipe, metric, value in mean.iter_rows()}
    columns = {kind: [values.get((name, kind)) for name in order] for kind in _KINDS}
    schema = {"recipe": pl.String, **dict.fromkeys(_KINDS, pl.Float64)}
    return pl.DataFrame({"recipe": order, **columns}, schema=schema)


def memory_bars(ax: Axes, frame: pl.DataFrame) -> Axes:
    """Draw two horizontal bars per recipe, solid for state and hatched for pinned gradient; return `ax`."""
    table = memory_table(frame)
    if table.is_empty():
        say_empty(ax, "state_bytes and pinned_gradient_bytes are undefined")
        return ax
    largest = max((v for kind in _KINDS for v in table[kind] if v is not None), default=0.0)
    unit, size = next((u, s) for u, s in _UNITS if largest >= s or u == "B")
    for row, (name, *amounts) in enumerate(table.iter_rows()):
        for place, amount in zip((-0.19, 0.19), amounts, strict=True):
            pinned = place > 0
            colour = family_colour(name)
            ax.barh(
                row + place,
                (amount or 0.0) / size,
                height=0.34,
                facecolor="none" if pinned else colour,
                edgecolor=colour,
                hatch="////" if pinned else None,
            )
            words = "not measured" if amount is None else readable_bytes(amount)
            ax.annotate(
                words,
                ((amount or 0.0) / size, row + place),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=6.8,
            )
    ax.set_yticks(range(table.height), [text(name, 26) for name in table["recipe"]])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(f"memory kept between steps [{unit}]")
    ax.set_xlim(0, (largest / size or 1.0) * 1.28)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
    ax.spines["left"].set_visible(False)
    return ax


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """One panel, all recipes. Unit: the largest binary unit that fits the largest bar."""
    from matplotlib.patches import Patch

    rows = max(1, memory_table(frame).height)
    figure, (ax,) = new_figure(width, 1, panel_height=0.65 + 0.34 * rows, legend_rows=1)
    memory_bars(ax, frame)
    handles = [
        Patch(facecolor=SOFT, edgecolor=SOFT, label="optimizer state"),
        Patch(facecolor="none", edgecolor=SOFT, hatch="////", label="pinned gradient"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


PLOT = Plot(
    name="memory_bars",
    title="Memory kept between steps",
    requires=_KINDS,
    draw=themed(draw),
    caption=(
        "Bytes that each recipe keeps for all replayed parameters: optimizer state (solid), and gradient buffers that "
        "must survive between steps (hatched). Hidden momentum moves bytes from the first to the second; only the sum "
        "is what a machine must hold."
    ),
)
