"""What the page shows, as Frames: where they come from, and the matrix of loads behind the heatmap.

Legend: E experts, S recorded steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl

from toolkit.frame import SCHEMA, empty_frame

#: Called with what is done and the total, or None where that is unknown.
Progress = Callable[[int, int | None], None]

LOAD = "expert_load"
GRADIENT = ("grad_norm", "grad_cos", "sign_flip_rate")
UPDATE = ("update_rms", "update_cos", "update_sign_flip_rate", "cos_to_gradient")


class Source(Protocol):
    """Where Frames come from. `gradients` and `updates` may take long; they are called off the page's thread."""

    title: str
    caption: str
    recipes: tuple[str, ...]  # what the page offers to compute; empty: nothing can be computed

    def layers(self) -> list[int | None]: ...

    def loads(self, layer: int | None) -> pl.DataFrame: ...

    def rows(self, layer: int | None) -> pl.DataFrame: ...

    def gradients(self, layer: int | None, progress: Progress) -> pl.DataFrame: ...

    def updates(self, layer: int | None, recipes: Sequence[str], progress: Progress) -> pl.DataFrame: ...


@dataclass(frozen=True)
class Load:
    """One layer's loads: `matrix` [E, S] share of routed slots, NaN where undefined; rows as `experts`."""

    experts: list[int]
    steps: list[int]
    matrix: np.ndarray

    def order(self) -> np.ndarray:
        """Row numbers, the busiest expert first."""
        known = np.isfinite(self.matrix)
        mean = np.where(known, self.matrix, 0).sum(1) / np.maximum(known.sum(1), 1)
        return np.argsort(-mean, kind="stable")


def load_of(rows: pl.DataFrame) -> Load:
    """The matrix of `rows`, the `expert_load` rows of one layer; several runs are averaged."""
    cells = rows.filter(pl.col("step").is_not_null(), pl.col("expert").is_not_null())
    experts, steps = cells["expert"].unique().sort(), cells["step"].unique().sort()
    matrix = np.full((len(experts), len(steps)), np.nan, np.float32)
    means = cells.drop_nulls("value").group_by("expert", "step").agg(pl.col("value").mean())
    places = tuple(
        np.searchsorted(all_.to_numpy(), means[k].to_numpy()) for all_, k in ((experts, "expert"), (steps, "step"))
    )
    matrix[places] = means["value"].to_numpy()
    return Load(experts.to_list(), steps.to_list(), matrix)


def pooled(values: np.ndarray, axis: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """`values` averaged into at most `limit` equal bins along `axis`, NaN left out, and the first place of each bin."""
    size = -(-values.shape[axis] // limit)
    starts = np.arange(0, values.shape[axis], max(size, 1))
    if size <= 1:
        return values, starts
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0), starts, axis)
    counts = np.add.reduceat(known.astype(np.int64), starts, axis)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).astype(np.float32), starts


class Content:
    """A source with what was computed of it so far. Safe to use from several threads."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.layers = source.layers()
        self._loads: dict[int | None, Load] = {}
        self._rows: dict[int | None, pl.DataFrame] = {}
        self._lock = threading.RLock()

    def load(self, layer: int | None) -> Load:
        """The layer's loads, computed at the first call."""
        with self._lock:
            if layer not in self._loads:
                self._loads[layer] = load_of(self.source.loads(layer))
            return self._loads[layer]

    def rows(self, layer: int | None) -> pl.DataFrame:
        """Every row of the layer that has a step: those of the source and those computed since."""
        with self._lock:
            if layer not in self._rows:
                self._rows[layer] = self.source.rows(layer)
            return self._rows[layer]

    def add(self, layer: int | None, rows: pl.DataFrame) -> None:
        """Take in computed rows; of a measurement that was there already the new one counts."""
        new = rows.filter(pl.col("step").is_not_null())
        with self._lock:
            keys = ["metric", "recipe", "param"]
            kept = self.rows(layer).join(new.select(keys).unique(), on=keys, how="anti", nulls_equal=True)
            self._rows[layer] = pl.concat([kept, new.select(list(SCHEMA))]) if new.height else kept

    def experts(self, layer: int | None) -> list[int]:
        """The ids of the layer's experts."""
        found = self.load(layer).experts
        return found or self.rows(layer)["expert"].drop_nulls().unique().sort().to_list()

    def steps(self, layer: int | None) -> list[int]:
        """The steps that the slider goes over."""
        found = self.load(layer).steps
        return found or self.rows(layer)["step"].drop_nulls().unique().sort().to_list()

    def params(self, layer: int | None) -> list[str]:
        """The parameters that have a row per expert."""
        rows = self.rows(layer).filter(pl.col("expert").is_not_null())
        return rows["param"].drop_nulls().unique().sort().to_list()

    def has(self, layer: int | None, metric: str, recipes: Iterable[str | None] = (None,)) -> bool:
        """Whether there is a row per expert of the metric for each of `recipes`."""
        rows = self.rows(layer).filter(pl.col("metric") == metric, pl.col("expert").is_not_null())
        return set(recipes) <= set(rows["recipe"].unique().to_list())


def nothing() -> pl.DataFrame:
    """No rows."""
    return empty_frame()
