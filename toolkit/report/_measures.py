"""What the verdict and the tables compare: one number per expert and parameter, for each measure of stability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from toolkit.plots._select import SUMMARIES, rows_of, whole_recording
from toolkit.plots.amplification_by_tokens import amplification_rows

ROLE = "routed_expert"
#: What identifies one expert's matrix of one parameter of one run.
UNIT = ("run", "arm", "seed", "layer", "param", "expert")


def unit_values(frame: pl.DataFrame, metric: str, lag: int | None = None) -> pl.DataFrame:
    """`recipe`, the columns of `UNIT` and `value`: the mean over the recording for routed experts.

    Where the frame holds only summaries over experts, a unit is a parameter (`expert` null) and the value its mean over
    experts. With `lag`, rows of another lag are left out; a row without a lag counts as lag 1.
    """
    rows = rows_of(frame, metric, ROLE)
    if lag is not None:
        rows = rows.filter(pl.col("lag").fill_null(1) == lag)
    whole = whole_recording(rows)
    single = whole.filter(~pl.col("flag").is_in(SUMMARIES))
    if single.is_empty():
        single = whole.filter(pl.col("flag") == "mean")
        if single.is_empty():
            single = whole.filter(pl.col("flag") == "p50")
    return single.select("recipe", *UNIT, "value")


def few_token_amplification(frame: pl.DataFrame) -> pl.DataFrame:
    """How many times harder a recipe steps, per unit of gradient, on few tokens than on many: `unit_values` of a ratio.

    Per parameter, "few" is the lowest quarter of the token counts of experts that got any, "many" the highest; the
    value of an expert is the geometric mean of its amplification on few tokens over that of all experts on many. The
    ratio is free of the lr that a recipe is meant for. Empty without rows per expert, or where all counts are equal.
    """
    rows = amplification_rows(frame, ROLE)
    group = ["recipe", "run", "arm", "seed", "layer", "param"]
    limits = rows.group_by(group).agg(
        few=pl.col("tokens").quantile(0.25, "linear"), many=pl.col("tokens").quantile(0.75, "linear")
    )
    rows = rows.join(limits, on=group, nulls_equal=True).filter(pl.col("few") < pl.col("many"))
    rows = rows.with_columns(log=pl.col("value").log())
    base = rows.filter(pl.col("tokens") >= pl.col("many")).group_by(group).agg(base=pl.col("log").mean())
    few = rows.filter(pl.col("tokens") <= pl.col("few")).group_by([*group, "expert"]).agg(pl.col("log").mean())
    joined = few.join(base, on=group, nulls_equal=True)
    return (
        joined.with_columns(value=(pl.col("log") - pl.col("base")).exp())
        .select("recipe", *UNIT, "value")
        .sort("recipe", *UNIT)
    )


@dataclass(frozen=True)
class Measure:
    """One measure of how an optimizer behaves on routed experts over time.

    `stable` is +1 where a larger value is the more stable one, -1 where a smaller one is. `as_ratio` compares two
    recipes by a factor instead of a difference, `needs_experts` cannot be had from summaries. `show` writes a value
    with its unit; `phrase` names it in a sentence; `words` are what is said of the less and of the more stable recipe.
    """

    key: str
    title: str
    metric: str
    stable: int
    values: Callable[[pl.DataFrame], pl.DataFrame]
    show: Callable[[float], str]
    phrase: str
    words: tuple[str, str] = ("less stable", "more stable")
    as_ratio: bool = False
    needs_experts: bool = False


def number(value: float, digits: int = 2) -> str:
    """`value` with a true minus sign and a fixed number of decimals."""
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", "\N{MINUS SIGN}")


def significant(value: float, digits: int = 2) -> str:
    """`value` with `digits` significant digits, whole up to ten thousand, scientific beyond and below a thousandth."""
    if value == 0:
        return "0"
    if 10**digits <= abs(value) < 1e4:
        text = f"{value:,.0f}"
    elif 1e-3 <= abs(value) < 1e3:
        text = f"{value:#.{digits}g}".rstrip(".")
    else:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "\N{MINUS SIGN}")


def percent(value: float) -> str:
    """A fraction as a percentage."""
    return f"{number(100 * value, 0 if abs(value) >= 0.0995 else 1)}%"


MEASURES = (
    Measure(
        "cosine",
        "update cosine, lag 1",
        "update_cos",
        +1,
        lambda f: unit_values(f, "update_cos", 1),
        number,
        "cosine between consecutive updates",
    ),
    Measure(
        "flips",
        "update sign flips, lag 1",
        "update_sign_flip_rate",
        -1,
        lambda f: unit_values(f, "update_sign_flip_rate", 1),
        percent,
        "sign flips per step",
    ),
    Measure(
        "few_tokens",
        "amplification on few / on many tokens",
        "amplification",
        -1,
        few_token_amplification,
        lambda v: f"{significant(v)}×",
        "amplification on few over many tokens",
        ("amplifies more", "amplifies less"),
        needs_experts=True,
        as_ratio=True,
    ),
    Measure(
        "zombie",
        "zombie displacement",
        "zombie_displacement",
        -1,
        lambda f: unit_values(f, "zombie_displacement"),
        significant,
        "displacement while idle",
        ("moves more", "moves less"),
    ),
)
