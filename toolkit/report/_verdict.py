"""What one frame shows about temporal stability on routed experts, in a sentence with numbers and an interval.

The sentence is computed, never assumed: it says "not decided" where the interval holds both signs, and the opposite of
what one might expect where the numbers do. It speaks about updates only; a replay knows nothing about losses.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl

from toolkit.plots._select import tidy
from toolkit.plots._theme import RECORDED, family_of, recipe_order
from toolkit.report._measures import MEASURES, ROLE, UNIT, Measure, number, significant

Reading = Literal["less stable", "more stable", "equal", "not decided"]
Outcome = Literal["less stable", "more stable", "equal", "mixed", "not decided", "no comparison"]

#: With fewer units a bootstrap decides too easily: all differences of five equal units have one sign 6% of the time.
MIN_UNITS = 6
#: Differences below this, as a part of the measure's scale, are rounding or not worth a word, however well resolved.
GRAIN = 1e-3
_RESAMPLES = 2000
#: The two measures that the headline rests on; the others are reported beside it.
_TEMPORAL = ("cosine", "flips")
_STATELESS = ("sinkgd",)
_SMOOTHED = ("mesh", "mesh_b")
_FARTHEST = "The two were picked because they lie farthest apart, which makes their difference look larger."


@dataclass(frozen=True)
class Comparison:
    """One measure under two recipes, on the experts that both have.

    `difference` is left minus right, or left over right for a ratio measure, with its 95% bootstrap interval over
    `units` (None with fewer than `MIN_UNITS`). A unit is an expert, or a parameter where the frame holds no rows per
    expert (`per_expert` False). `reading` is about the left recipe.
    """

    measure: Measure
    left: str
    right: str
    left_value: float
    right_value: float
    difference: float
    low: float | None
    high: float | None
    units: int
    per_expert: bool
    reading: Reading

    @property
    def gap(self) -> str:
        """The difference (or factor) as the report prints it."""
        return self._show(self.difference) + self._unit

    @property
    def interval(self) -> str:
        """Its 95% interval, or why there is none."""
        if self.low is None or self.high is None:
            return f"no interval from {self.units} units"
        low, high = self._show(self.low), self._show(self.high)
        if low == high and self.low != self.high and self.measure.key == "flips":
            low, high = number(100 * self.low, 1), number(100 * self.high, 1)
        return f"{low} to {high}{self._unit}"

    @property
    def words(self) -> str:
        """The reading in words that fit the measure."""
        less, more = self.measure.words
        return {"less stable": less, "more stable": more}.get(self.reading, self.reading)

    @property
    def _unit(self) -> str:
        return "×" if self.measure.as_ratio else " points" if self.measure.key == "flips" else ""

    def _show(self, value: float) -> str:
        if self.measure.as_ratio and abs(self.difference - 1) < 0.1:
            return number(value, 3)
        if self.measure.as_ratio or self.measure.key == "zombie":
            return significant(value)
        if self.measure.key == "flips":
            return number(100 * value, 0 if abs(self.difference) >= 0.0995 else 1)
        return number(value, 2 if abs(self.difference) >= 0.01 else 4)


@dataclass(frozen=True)
class Verdict:
    """`headline` is the one sentence; `details` are further sentences; `comparisons` are the numbers behind them."""

    headline: str
    outcome: Outcome
    details: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()


def compare(frame: pl.DataFrame, measure: Measure, left: str, right: str) -> Comparison | None:
    """`measure` under `left` and `right`, paired by expert and parameter; None where either has no defined value."""
    values = measure.values(frame)
    if measure.as_ratio:
        values = values.with_columns(pl.col("value").log())
    keys = list(UNIT)
    mine = values.filter(pl.col("recipe") == left).drop("recipe")
    other = values.filter(pl.col("recipe") == right).drop("recipe").rename({"value": "other"})
    both = mine.join(other, on=keys, how="inner", nulls_equal=True)
    if both.is_empty():
        return None
    both = by_expert(both)
    a, b = both["value"].to_numpy(), both["other"].to_numpy()
    gap = a - b
    low, high = bootstrap_interval(gap)
    # Cosines, fractions and logarithms have 1 as their scale; a displacement has its own size.
    scale = max(float(np.abs(a).mean()), float(np.abs(b).mean())) if measure.key == "zombie" else 1.0
    back = math.exp if measure.as_ratio else float
    return Comparison(
        measure,
        left,
        right,
        back(a.mean()),
        back(b.mean()),
        back(gap.mean()),
        None if low is None else back(low),
        None if high is None else back(high),
        len(gap),
        bool(both["expert"].is_not_null().any()),
        _reading(gap, low, high, measure.stable, scale),
    )


def by_expert(values: pl.DataFrame) -> pl.DataFrame:
    """One row per expert, or per parameter where `expert` is null, in order; numbers are averaged.

    The parameters of one expert get the same tokens, so they are no independent draws for an interval.
    """
    parameter = pl.when(pl.col("expert").is_null()).then("param")
    return values.with_columns(param=parameter).group_by(UNIT).agg(pl.selectors.float().mean()).sort(UNIT)


def bootstrap_interval(values: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """The 95% bootstrap interval of the mean of `values` [n], the same at every call.

    Bias-corrected and accelerated (Efron 1987) up to 1000 values, plain percentiles beyond. (None, None) with fewer
    than `MIN_UNITS` values; the mean twice where all are equal.
    """
    from scipy import stats

    if values.size < MIN_UNITS:
        return None, None
    spread = float(np.ptp(values))
    if spread <= 1e-12 * max(1.0, float(np.abs(values).max())):
        return float(values.mean()), float(values.mean())
    # scipy renamed the argument; both names are current somewhere.
    name = "rng" if "rng" in inspect.signature(stats.bootstrap).parameters else "random_state"
    # The bias correction costs n x n; for many values it changes nothing that is printed.
    method = "BCa" if values.size <= 1000 else "percentile"
    batch = max(1, 4_000_000 // values.size)
    options = {"n_resamples": _RESAMPLES, "method": method, "batch": batch, name: np.random.default_rng(0)}
    found = stats.bootstrap((values,), np.mean, **options).confidence_interval
    low, high = float(found.low), float(found.high)
    if not (math.isfinite(low) and math.isfinite(high)):
        options |= {"method": "percentile", name: np.random.default_rng(0)}
        found = stats.bootstrap((values,), np.mean, **options).confidence_interval
        low, high = float(found.low), float(found.high)
    return low, high


def verdict(frame: pl.DataFrame | pl.LazyFrame) -> Verdict:
    """The verdict on `frame`. Always answers; where nothing can be compared, it says why and what to add."""
    frame = tidy(frame)
    routed = frame.filter((pl.col("role") == ROLE) & (pl.col("recipe") != RECORDED))
    recipes = recipe_order(routed["recipe"].unique().to_list())
    if not recipes:
        why = "no updates" if (frame["role"] == ROLE).any() else "no routed experts"
        return Verdict(
            f"No verdict: this frame holds {why}, so there is nothing to compare; "
            "replay a recording of routed experts with --metric update_cos.",
            "no comparison",
        )
    usable = [r for r in recipes if _has_temporal(routed, r)]
    if not usable:
        return Verdict(
            "No verdict: neither update_cos nor update_sign_flip_rate at lag 1 is defined for routed experts in this "
            "frame; add --metric update_cos and record at least two consecutive steps.",
            "no comparison",
        )
    if len(usable) == 1:
        return Verdict(f"Nothing to compare: {_alone(routed, usable[0])}.", "no comparison")
    stateless, smoothed = _pick(usable, _STATELESS), _pick(usable, _SMOOTHED)
    reference = _reference(routed, usable, {stateless, smoothed})
    others = [name for name in (smoothed, reference) if name is not None and name != stateless]
    if stateless is None or not others:
        return _ranking(routed, usable)
    compared = [_against(frame, stateless, name) for name in others]
    headline, outcome = _headline(stateless, others[0], compared[0])
    details = [say(stateless, others[0], compared[0]) for say in (_few_tokens, _zombies)]
    if others[0] == smoothed:
        details.insert(
            0,
            f"{smoothed} averages over past steps, so steadier updates are what it is built to give: read the size of "
            "the difference, and not its sign, as the finding.",
        )
    if smoothed is None:
        details.insert(0, "MESH was not replayed, so the comparison is with the reference alone.")
    for name, found in zip(others[1:], compared[1:], strict=True):
        details.append(_headline(stateless, name, found, "Against the reference")[0])
    details.append(_left_out(compared[0]))
    details.append(_scope(compared[0]))
    return Verdict(headline, outcome, tuple(d for d in details if d), tuple(c for found in compared for c in found))


def _against(frame: pl.DataFrame, left: str, right: str) -> list[Comparison]:
    found = (compare(frame, measure, left, right) for measure in MEASURES)
    return [c for c in found if c is not None]


def _headline(left: str, right: str, found: list[Comparison], where: str = "On routed experts") -> tuple[str, Outcome]:
    temporal = [c for c in found if c.measure.key in _TEMPORAL]
    if not temporal:
        return (
            f"Not decided: {left} and {right} share no routed expert with a defined update cosine or sign flip rate.",
            "not decided",
        )
    readings = {c.reading for c in temporal}
    numbers = " and ".join(_numbers(c) for c in temporal)
    subject = f"{where}, {left}'s updates are"
    if readings >= {"less stable", "more stable"}:
        says = " but ".join(f"{c.reading} by {c.measure.phrase}" for c in temporal)
        return f"The measures disagree. {subject} {says} than {right}'s: {numbers}.", "mixed"
    if "less stable" in readings:
        return f"{subject} less stable over time than {right}'s: {numbers}.", "less stable"
    if "more stable" in readings:
        return f"{subject} not less but more stable over time than {right}'s: {numbers}.", "more stable"
    if readings == {"equal"}:
        return f"{subject} not less stable over time than {right}'s, but equally stable: {numbers}.", "equal"
    return f"Not decided. {subject} not shown to be less stable over time than {right}'s: {numbers}.", "not decided"


def _numbers(c: Comparison) -> str:
    show = c.measure.show
    values = f"{c.measure.phrase} {show(c.left_value)} against {show(c.right_value)}"
    over = "experts" if c.per_expert else "parameters"
    words = f"too few {over} for an interval" if c.low is None else f"95% interval over {over} {c.interval}"
    return f"{values} (difference {c.gap}, {words})"


def _few_tokens(left: str, right: str, found: list[Comparison]) -> str:
    c = next((c for c in found if c.measure.key == "few_tokens"), None)
    if c is None:
        return ""
    words = {
        "less stable": f"{c.gap} {right}'s ratio, so more strongly",
        "more stable": f"{c.gap} {right}'s ratio, so less strongly",
        "equal": f"the same ratio as {right}'s",
        "not decided": f"{c.gap} {right}'s ratio, which is not decided",
    }[c.reading]
    return (
        f"Where an expert saw few tokens, {left} steps {c.measure.show(c.left_value)} as hard per unit of gradient as "
        f"where it saw many: {words} (95% interval {c.interval})."
    )


def _zombies(left: str, right: str, found: list[Comparison]) -> str:
    c = next((c for c in found if c.measure.key == "zombie"), None)
    if c is None:
        return ""
    if c.left_value == 0 and c.right_value == 0:
        return f"Neither {left} nor {right} moved an idle expert."
    return (
        f"Experts without a gradient were moved by {c.measure.show(c.left_value)} under {left} and "
        f"{c.measure.show(c.right_value)} under {right} (summed norm of the moves, mean over experts)."
    )


def _left_out(found: list[Comparison]) -> str:
    absent = [m for m in MEASURES if m.key not in {c.measure.key for c in found}]
    lacking = [f"{m.metric} per expert" if m.needs_experts else m.metric for m in absent]
    return f"Undefined or not measured for both, so left out: {', '.join(lacking)}." if lacking else ""


def _scope(found: list[Comparison]) -> str:
    if not found:
        return ""
    c = found[0]
    what = "experts (each the mean over its parameters)"
    if not c.per_expert:
        what = f"parameters (the frame holds summaries over experts; --per-expert {c.measure.metric} gives more)"
    return (
        f"Intervals: paired bootstrap over {c.units} {what} of this one recording. They say how alike the experts "
        "are, not what another seed, model or data set would give: for that, record several runs. Nothing here says "
        "which recipe trains better."
    )


def _ranking(frame: pl.DataFrame, usable: list[str]) -> Verdict:
    measure = next(m for m in MEASURES if m.key in _TEMPORAL and not m.values(frame).is_empty())
    values = measure.values(frame).group_by("recipe").agg(pl.col("value").mean(), units=pl.len())
    ordered = values.sort(pl.col("value") * -measure.stable, "recipe")["recipe"].to_list()
    best, worst = ordered[0], ordered[-1]
    found = compare(frame, measure, worst, best) if best != worst else None
    gap = f" (difference {found.gap}, 95% interval {found.interval}, {found.reading})" if found is not None else ""
    value = dict(zip(values["recipe"], values["value"], strict=True))
    missing = [
        name
        for name, picked in (("sinkgd", _pick(usable, _STATELESS)), ("mesh", _pick(usable, _SMOOTHED)))
        if not picked
    ]
    return Verdict(
        f"Stateless Sinkhorn is not compared with MESH, for lack of {' and '.join(missing)}: on routed experts the "
        f"{measure.title} is {measure.show(value[best])} under {best}, the most stable of {len(ordered)} recipes, and "
        f"{measure.show(value[worst])} under {worst}, the least{gap}.",
        "no comparison",
        (_FARTHEST,),
        () if found is None else (found,),
    )


def _alone(frame: pl.DataFrame, name: str) -> str:
    parts = []
    for measure in MEASURES[:2]:
        values = by_expert(measure.values(frame).filter(pl.col("recipe") == name))["value"].to_numpy()
        if values.size:
            low, high = bootstrap_interval(values)
            gap = "" if low is None or high is None else f" (95% interval {measure.show(low)} to {measure.show(high)})"
            parts.append(f"{measure.title} {measure.show(float(values.mean()))}{gap}")
    return f"only {name} has defined updates on routed experts; {', '.join(parts)}"


def _has_temporal(frame: pl.DataFrame, name: str) -> bool:
    mine = frame.filter(pl.col("recipe") == name)
    return any(not m.values(mine).is_empty() for m in MEASURES if m.key in _TEMPORAL)


def _pick(recipes: list[str], families: tuple[str, ...]) -> str | None:
    """The plain recipe of the first family that is present, else its first variant."""
    for family in families:
        members = [name for name in recipes if family_of(name) == family]
        if members:
            return members[0]
    return None


def _reference(frame: pl.DataFrame, recipes: list[str], taken: set[str | None]) -> str | None:
    """The recipe that the replay measured the others against (its cosine to the reference is 1), else adamw."""
    rows = frame.filter((pl.col("metric") == "cos_to_reference") & pl.col("value").is_finite().fill_null(False))
    lowest = rows.group_by("recipe").agg(pl.col("value").min())
    same = set(lowest.filter(pl.col("value") > 1 - 1e-6)["recipe"].to_list())
    free = [name for name in recipes if name not in taken]
    for name in [*(n for n in free if n in same), *(n for n in free if family_of(n) == "adamw")]:
        return name
    return None


def _reading(gap: np.ndarray, low: float | None, high: float | None, stable: int, scale: float) -> Reading:
    """What the interval says; "equal" where all of it, or every single gap, is smaller than `GRAIN` of `scale`."""
    grain = GRAIN * scale
    if np.abs(gap).max() <= grain:
        return "equal"
    if low is None or high is None:
        return "not decided"
    if max(abs(low), abs(high)) <= grain:
        return "equal"
    if low <= 0 <= high:
        return "not decided"
    return "more stable" if (low > 0) == (stable > 0) else "less stable"
