"""Experts as units of a figure: one matrix of values by expert and step, and an order of experts."""

from __future__ import annotations

import numpy as np
import polars as pl

from toolkit.plots._select import SUMMARIES, need_per_expert


def per_expert(frame: pl.DataFrame, metric: str, plot: str) -> pl.DataFrame:
    """Rows of `metric` per expert of routed experts; an error says what to add where there are only summaries."""
    rows = frame.filter(
        (pl.col("metric") == metric) & pl.col("expert").is_not_null() & ~pl.col("flag").is_in(SUMMARIES)
    )
    if rows.is_empty():
        raise need_per_expert(plot, metric)
    return rows


def smallest_lag(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows of the smallest lag that is there."""
    lag = rows["lag"].min()
    return rows if lag is None else rows.filter(pl.col("lag") == lag)


def first_layer(rows: pl.DataFrame, layer: int | None = None) -> pl.DataFrame:
    """The rows of `layer`; without it, of the first layer in the frame."""
    wanted = rows["layer"].min() if layer is None else layer
    return rows.filter(pl.col("layer").eq_missing(pl.lit(wanted, dtype=pl.Int32)))


def by_expert_and_step(rows: pl.DataFrame) -> tuple[np.ndarray, list[int], list[int]]:
    """Values [experts, steps], the mean over an expert's parameters, NaN where undefined; expert ids and steps."""
    rows = rows.drop_nulls("step")
    experts = rows["expert"].unique().sort().to_list()
    steps = rows["step"].unique().sort().to_list()
    matrix = np.full((len(experts), len(steps)), np.nan)
    cells = rows.filter(pl.col("value").is_finite().fill_null(False))
    cells = cells.group_by("expert", "step").agg(pl.col("value").mean())
    at = (np.searchsorted(experts, cells["expert"].to_numpy()), np.searchsorted(steps, cells["step"].to_numpy()))
    matrix[at] = cells["value"].to_numpy()
    return matrix, experts, steps


def row_means(matrix: np.ndarray) -> np.ndarray:
    """Mean of each row over what is defined, NaN for a row without."""
    known = np.isfinite(matrix)
    count = known.sum(1)
    return np.where(count > 0, np.where(known, matrix, 0.0).sum(1) / np.maximum(count, 1), np.nan)
