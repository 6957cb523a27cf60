"""A Frame as tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from toolkit.frame import OPEN_LOOP_NOTE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: The role shown where the frame has it: the question is about routed experts.
MAIN_ROLE = "routed_expert"
#: Columns of values in one table: 80 columns hold a label of 24 and five of these.
VALUES_PER_TABLE = 5
_LABEL_WIDTH = 28
_SUMMARY_FLAGS = ("", "mean")
#: Costs of parameters add up; everything else is averaged.
_ADDED_UNITS = ("B", "ms")


def print_summary(
    console: Console, frame: pl.DataFrame, *, notes: Iterable[str] = (), path: Path | None = None
) -> None:
    """The tables, then notes and what diverged, the open-loop sentence, and where the Frame is."""
    for part in summary(frame):
        console.print(part, markup=False)
    if roles := other_roles(frame):
        console.print(f"The Frame also holds: {', '.join(roles)}", markup=False)
    for note in (*notes, *diverged(frame)):
        console.print(f"Note: {note}", markup=False)
    console.print(f"{OPEN_LOOP_NOTE}.", markup=False)
    console.print(f"Frame: {path} ({frame.height} rows)", markup=False, soft_wrap=True)


def summary(frame: pl.DataFrame) -> Iterator[Table | str]:
    """First what the trace alone says, by role; then one row per recipe for the main role, five metrics a table.

    A cell is the mean over steps, then over parameters or layers, of the `mean` rows where experts were summarised. Of
    several lags the smallest is shown.
    """
    values = _means(frame)
    recorded = values.filter(pl.col("recipe").is_null())
    if recorded.height:
        yield from _tables("Recorded run, mean over steps", recorded, "role", _roles(recorded))
    replayed = values.filter(pl.col("recipe").is_not_null())
    roles = _roles(replayed)
    if not roles:
        return
    role = MAIN_ROLE if MAIN_ROLE in roles else roles[0]
    order = replayed["recipe"].unique(maintain_order=True).to_list()
    shown = replayed.filter(pl.col("role") == role)
    added = " (bytes and ms: sum over parameters)" if shown["unit"].is_in(_ADDED_UNITS).any() else ""
    yield from _tables(f"Recipes, role {role}, mean over steps{added}", shown, "recipe", order)


def other_roles(frame: pl.DataFrame) -> list[str]:
    """Roles with rows of recipes that the tables leave out."""
    roles = _roles(_means(frame).filter(pl.col("recipe").is_not_null()))
    return [role for role in roles if role != (MAIN_ROLE if MAIN_ROLE in roles else roles[0])]


def diverged(frame: pl.DataFrame) -> list[str]:
    """One sentence per recipe that stopped being finite: when first, and in how many places."""
    rows = frame.filter(pl.col("flag") == "diverged")
    found = rows.group_by("recipe", maintain_order=True).agg(pl.col("step").min(), pl.len().alias("count"))
    return [
        f"{row['recipe']} diverged: weights not finite from step {row['step']} on, in {row['count']} matrices"
        for row in found.iter_rows(named=True)
    ]


def number(value: float | None, unit: str = "1") -> str:
    """Three significant digits; bytes in binary units; an en dash for what is undefined."""
    if value is None:
        return "–"
    if unit == "B":
        for name in ("B", "KiB", "MiB", "GiB"):
            if abs(value) < 1024 or name == "GiB":
                return f"{value:.4g} {name}"
            value /= 1024
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.2e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _means(frame: pl.DataFrame) -> pl.DataFrame:
    kept = frame.filter(pl.col("flag").cast(pl.String).is_in(_SUMMARY_FLAGS) & pl.col("value").is_not_null())
    keys = ["recipe", "role", "metric", "lag"]
    steps = kept.group_by(*keys, "param", maintain_order=True).agg(pl.col("value").mean(), pl.col("unit").first())
    added = pl.col("unit").first().is_in(_ADDED_UNITS)
    value = pl.when(added).then(pl.col("value").sum()).otherwise(pl.col("value").mean())
    means = steps.group_by(*keys, maintain_order=True).agg(value.alias("value"), pl.col("unit").first())
    smallest = pl.col("lag").is_null() | (pl.col("lag") == pl.col("lag").min().over("metric"))
    return means.filter(smallest).with_columns(pl.col("role").cast(pl.String).fill_null("layer"))


def _roles(values: pl.DataFrame) -> list[str]:
    found = values["role"].unique(maintain_order=True).to_list()
    return sorted(found, key=lambda role: (role != MAIN_ROLE, role == "layer"))


def _tables(title: str, values: pl.DataFrame, by: str, labels: list[str]) -> Iterator[Table | str]:
    from rich.table import Table

    yield title
    columns = values.select("metric", "lag", "unit").unique(maintain_order=True).rows()
    cells = {(row[by], row["metric"], row["lag"]): row["value"] for row in values.iter_rows(named=True)}
    for start in range(0, len(columns), VALUES_PER_TABLE):
        part = columns[start : start + VALUES_PER_TABLE]
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("\n".join(by.split("_")), no_wrap=False, overflow="fold", max_width=_LABEL_WIDTH)
        for metric, lag, _ in part:
            head = metric.replace("_", "\n") + ("" if lag is None else f"\nlag {lag}")
            table.add_column(head, justify="right", vertical="bottom")
        for label in labels:
            row = [cells.get((label, metric, lag)) for metric, lag, _ in part]
            if any(value is not None for value in row):
                table.add_row(label, *(number(v, c[2]) for v, c in zip(row, part, strict=True)))
        yield table
        yield ""
