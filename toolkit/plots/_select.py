"""Reading a Frame: ordinary values where they exist, summaries over experts where they do not.

Rows whose flag is `mean`, `p10`, `p50` or `p90` are summaries over experts; every other row is one value. Null and
non-finite values are left out of every average and counted as absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import polars as pl

from toolkit.frame import SCHEMA
from toolkit.plots._theme import RECORDED, ROLE_ORDER
from traces.errors import GradreelError

SUMMARIES = ("mean", "p10", "p50", "p90")
#: What tells one series of a metric from another.
_SERIES = ("run", "arm", "seed", "recipe", "param", "layer")


def tidy(frame: pl.DataFrame | pl.LazyFrame) -> pl.DataFrame:
    """The Frame with plain string columns and without a null recipe; a table that is no Frame is an error."""
    table = frame.collect() if isinstance(frame, pl.LazyFrame) else frame
    lacking = [name for name in SCHEMA if name not in table.columns]
    if lacking:
        raise GradreelError(f"this table is no Frame: it lacks {', '.join(lacking)}; read it with read_frame")
    recipe = pl.col("recipe").cast(pl.String)
    return table.with_columns(
        pl.col("role").cast(pl.String),
        pl.col("flag").cast(pl.String).fill_null(""),
        pl.col("value").cast(pl.Float64),
        pl.col("support").cast(pl.Float64),
        pl.when(recipe.is_null() | (recipe == "")).then(pl.lit(RECORDED)).otherwise(recipe).alias("recipe"),
    )


def rows_of(frame: pl.DataFrame, metric: str, role: str | None = None) -> pl.DataFrame:
    """The finite rows of `metric` (of one role); summaries only for series without ordinary values."""
    rows = frame.filter((pl.col("metric") == metric) & pl.col("value").is_finite().fill_null(False))
    if role is not None:
        rows = rows.filter(pl.col("role") == role)
    is_summary = pl.col("flag").is_in(SUMMARIES)
    single = rows.filter(~is_summary)
    summary = rows.filter(is_summary)
    if single.is_empty() or summary.is_empty():
        return rows
    keys = list(_SERIES)
    return pl.concat([single, summary.join(single.select(keys).unique(), on=keys, how="anti", nulls_equal=True)])


def bands(rows: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Per group of `by`: `mid` (median), `low` and `high` (10th and 90th percentile) and `count` of values.

    Where only summaries over experts are at hand, each of the three is the average, over parameters, of the summaries
    of that kind: a percentile of percentiles cannot be had.
    """
    keys = list(by)
    single = rows.filter(~pl.col("flag").is_in(SUMMARIES))
    value = pl.col("value")
    direct = single.group_by(keys).agg(
        mid=value.quantile(0.5, "linear"),
        low=value.quantile(0.1, "linear"),
        high=value.quantile(0.9, "linear"),
        count=pl.len(),
    )
    summary = rows.filter(pl.col("flag").is_in(SUMMARIES))
    if summary.is_empty():
        return direct.sort(keys)

    def of(flag: str) -> pl.Expr:
        return value.filter(pl.col("flag") == flag).mean()

    indirect = summary.group_by(keys).agg(
        mid=pl.coalesce(of("p50"), of("mean")),
        low=pl.coalesce(of("p10"), of("p50"), of("mean")),
        high=pl.coalesce(of("p90"), of("p50"), of("mean")),
        count=pl.len(),
    )
    if single.is_empty():
        return indirect.sort(keys)
    only_indirect = indirect.join(direct.select(keys), on=keys, how="anti", nulls_equal=True)
    return pl.concat([direct, only_indirect]).sort(keys)


def whole_recording(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per series, expert, lag and flag: the row without a step if there is one, else the mean over steps."""
    keys = [*_SERIES, "role", "expert", "metric", "lag", "flag"]
    final = pl.col("step").is_null()
    value = pl.coalesce(pl.col("value").filter(final).mean(), pl.col("value").mean())
    return rows.group_by(keys).agg(value, pl.col("support").mean()).sort(keys, nulls_last=True)


def roles_in(rows: pl.DataFrame, wanted: Iterable[str] | None = None) -> list[str]:
    """The roles of `rows` in the order of importance; with `wanted`, those of them that are present."""
    present = set(rows["role"].drop_nulls().unique().to_list())
    if wanted is not None:
        return [role for role in wanted if role in present]
    return [role for role in ROLE_ORDER if role in present]


def thin_steps(rows: pl.DataFrame, limit: int = 240) -> pl.DataFrame:
    """`rows` with the steps gathered into at most `limit` equal bins, each named by its middle step."""
    steps = rows["step"].drop_nulls().unique().sort()
    if steps.len() <= limit:
        return rows
    size = -(-steps.len() // limit)
    places = pl.DataFrame({"step": steps}).with_columns(bin=pl.int_range(pl.len()) // size)
    middle = places.group_by("bin").agg(middle=pl.col("step").median().round().cast(pl.Int64))
    named = places.join(middle, on="bin").select("step", "middle")
    return rows.join(named, on="step", how="left").with_columns(step=pl.col("middle")).drop("middle")


def need_per_expert(plot: str, metric: str) -> GradreelError:
    """The error for a Frame that holds only summaries of `metric` where values per expert are needed."""
    return GradreelError(
        f"plot {plot} needs {metric} per expert, this frame holds only summaries over experts; "
        f"replay with --per-expert {metric}"
    )
