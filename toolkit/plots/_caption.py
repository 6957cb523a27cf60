"""The words under a figure: how to read it, and which trace and which loop it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.frame import OPEN_LOOP_NOTE
from toolkit.plots._plot import Plot
from toolkit.plots._theme import text

if TYPE_CHECKING:
    from collections.abc import Sequence


def caption_of(plot: Plot, frame: pl.DataFrame) -> str:
    """The plot's caption, the traces in `frame`, and for a figure with replayed recipes that replay is open-loop."""
    rows = frame.filter(pl.col("metric").is_in(list(plot.requires)))
    runs: Sequence[str] = rows["run"].drop_nulls().unique().sort().to_list()
    parts = [plot.caption]
    if runs:
        parts.append(f"Trace {', '.join(text(run) for run in runs[:3])}{' and others' if len(runs) > 3 else ''}.")
    if rows["recipe"].drop_nulls().len() and plot.about in ("updates", "trajectory"):
        parts.append(f"{OPEN_LOOP_NOTE}.")
    return " ".join(parts)
