"""The one table: every measurement of every run, replay and ablation, in long form.

A Frame is a polars DataFrame with the columns of `SCHEMA`. It is written to parquet row groups while it is produced,
so a long replay holds at most one row group in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from traces.views import ROLES

#: Why a value looks as it does. Empty: an ordinary value. `mean` .. `p90`: a summary over experts.
FLAGS = (
    "",
    "mean",
    "p10",
    "p50",
    "p90",
    "nonfinite",
    "undefined",
    "diverged",
    "skipped",
    "zombie",
)

SCHEMA: dict[str, Any] = {
    "run": pl.String,
    "arm": pl.String,
    "seed": pl.Int64,
    "recipe": pl.String,
    "step": pl.Int64,
    "param": pl.String,
    "role": pl.Enum(ROLES),
    "layer": pl.Int32,
    "expert": pl.Int32,
    "metric": pl.String,
    "lag": pl.Int32,
    "value": pl.Float64,
    "support": pl.Float64,
    "flag": pl.Enum(FLAGS),
    "unit": pl.String,
}
