"""Every measure of a trace, per role and per expert, with intervals; and the experts ranked by predicted harm.

Legend: U units (an expert of a parameter, or a parameter or layer without experts), S steps, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from ablations.study._score import COMPONENTS, block_weights, ends, harm_scores, over_units, weighted_means
from traces.errors import GradreelError
from traces.reader import Trace

#: The stateless update whose harm is predicted, and the gradient itself, of which the stable rank is taken.
STATELESS, GRADIENT = "sinkgd(alpha=1.0)", "sgd"
_LEFT_OUT = ("state_bytes", "pinned_gradient_bytes", "step_ms", "cos_to_reference", "drift_from_reference", "diverged")
_SUMMARISED = ("", "nonfinite", "undefined")


@dataclass(frozen=True)
class Measured:
    """`rows` of the Frame; `components` {name: [U]} by (layer, expert) of `experts`; `scores` [U] with their ends."""

    rows: list[dict[str, Any]]
    experts: list[tuple[int, int]]
    components: Mapping[str, np.ndarray]
    scores: np.ndarray
    low: np.ndarray
    high: np.ndarray


def replay_for_study(trace: Trace, out: Any, progress: bool | None = None) -> Any:
    """A replay of `trace` through the stateless update and the gradient itself, a row per expert and step."""
    from toolkit.replay import replay
    from toolkit.variants import recipe

    if not trace.steps:
        raise GradreelError(f"{str(trace.path)!r} holds no recorded step; record some and study them")
    options: dict[str, Any] = {"per_expert": True, "out": out, "progress": progress}
    if "gradient" not in trace.streams:
        if "routing" not in trace.streams:
            raise GradreelError(f"{str(trace.path)!r} holds neither gradients nor routing, which a study is about")
        return replay(trace, None, **options)
    recipes = {GRADIENT: recipe(GRADIENT), STATELESS: recipe(STATELESS)}
    return replay(trace, recipes, gaps=None if trace.contiguous() else "bursts", **options)


def measure(trace: Trace, lazy: pl.LazyFrame) -> Measured:
    """Means over the recorded steps of everything in `lazy`, with intervals, and the experts' scores."""
    steps = np.asarray(trace.steps)
    weights = block_weights(steps)
    sides = {n: min(p.shape[a] for a in p.matrix_axes) for n, p in trace.infos.items() if p.matrix_axes is not None}
    rows: list[dict[str, Any]] = []
    parts: dict[str, list[tuple[pl.DataFrame, np.ndarray, np.ndarray]]] = {}
    for labels, units, values in _tables(lazy, steps):
        whole = values.shape[0] == 1  # a measure of the whole recording: no steps to resample
        means = weighted_means(values, np.ones((1, values.shape[0])))
        resampled = means if whole else weighted_means(values, weights)
        rows.extend(_unit_rows(labels, units, means[0], None if whole else ends(resampled), values))
        rows.extend(_role_rows(labels, units, means[0], resampled))
        name = str(labels["metric"])
        if name == "stable_rank":
            side = np.array([sides.get(str(p), np.nan) for p in units["param"].to_list()])
            parts.setdefault("stable_rank_share", []).append((units, means / side, resampled / side))
        elif name in COMPONENTS:
            parts.setdefault(name, []).append((units, means, resampled))
    experts, components, resamples = _by_expert(parts)
    if not experts:
        return Measured(rows, [], {}, np.empty(0), np.empty(0), np.empty(0))
    scores = harm_scores(components)
    count = len(weights)
    drawn = harm_scores({name: np.broadcast_to(v, (count, len(experts))) for name, v in resamples.items()})
    low, high = ends(drawn)
    for place, (layer, expert) in enumerate(experts):
        where = {"role": "routed_expert", "layer": layer, "expert": expert, "unit": "1"}
        for end, value in (("", scores), ("_low", low), ("_high", high)):
            rows.append({**where, "metric": f"predicted_harm{end}", "value": float(value[place])})
        rows.extend(
            {**where, "metric": f"component.{name}", "value": float(v[place])} for name, v in components.items()
        )
    for name, v in components.items():
        mean = float(np.nanmean(v)) if np.isfinite(v).any() else None
        rows.append({"role": "routed_expert", "unit": "1", "metric": f"component.{name}", "value": mean})
    return Measured(rows, experts, components, scores, low, high)


def _tables(lazy: pl.LazyFrame, steps: np.ndarray) -> Iterator[tuple[dict[str, Any], pl.DataFrame, np.ndarray]]:
    """One table per measure and role: (labels, units, values [S or 1, U]), read one metric at a time."""
    names = lazy.select(pl.col("metric").unique().sort()).collect()["metric"].to_list()
    place = {int(step): n for n, step in enumerate(steps)}
    for name in names:
        if name in _LEFT_OUT:
            continue
        table = lazy.filter((pl.col("metric") == name) & pl.col("flag").cast(pl.String).is_in(_SUMMARISED)).collect()
        # Of the gradient taken as an update only the rank is wanted: the rest is said by the trace's own measures.
        kept = GRADIENT if name == "stable_rank" else STATELESS
        table = table.filter(pl.col("recipe").is_null() | (pl.col("recipe") == kept))
        for (role, lag), part in table.group_by(["role", "lag"], maintain_order=True):
            unit_keys = ["param", "layer", "expert"]
            # What is known at steps is taken from them; results over the whole recording only where there is no step.
            at_steps = part.filter(pl.col("step").is_not_null())
            ending = name in ("idle_run_length",) or at_steps.is_empty()
            part = part.filter(pl.col("step").is_null()) if ending else at_steps
            if part.is_empty():
                continue
            units = part.select(unit_keys).unique(maintain_order=True).with_row_index("unit_number")
            joined = part.join(units, on=unit_keys, nulls_equal=True)
            values = np.full((1 if ending else len(steps), units.height), np.nan)
            at = np.zeros(joined.height, int) if ending else np.array([place[int(s)] for s in joined["step"]])
            found = joined["value"].cast(pl.Float64).fill_null(np.nan).to_numpy()
            values[at, joined["unit_number"].to_numpy()] = found
            labels = {"metric": name, "role": role, "lag": lag, "recipe": part["recipe"][0], "unit": part["unit"][0]}
            yield labels, units, values


def _unit_rows(
    labels: Mapping[str, Any],
    units: pl.DataFrame,
    means: np.ndarray,
    interval: tuple[np.ndarray, np.ndarray] | None,
    values: np.ndarray,
) -> Iterator[dict[str, Any]]:
    """Mean over steps of each unit, with `_low` and `_high` where steps were resampled."""
    support = np.isfinite(values).sum(axis=0)
    for n, unit in enumerate(units.iter_rows(named=True)):
        where = {**labels, **{key: unit[key] for key in ("param", "layer", "expert")}, "support": float(support[n])}
        flag = "" if np.isfinite(means[n]) else "undefined"
        yield {**where, "value": float(means[n]), "flag": flag}
        for end, side in zip(("low", "high"), interval or (), strict=False):
            if np.isfinite(side[n]):
                yield {**where, "metric": f"{labels['metric']}_{end}", "value": float(side[n])}


def _role_rows(
    labels: Mapping[str, Any], units: pl.DataFrame, means: np.ndarray, resampled: np.ndarray
) -> Iterator[dict[str, Any]]:
    """The mean over a role's units, flag `mean`; its interval resamples blocks of steps and units together."""
    known = means[np.isfinite(means)]
    where = {**labels, "support": float(len(known)), "flag": "mean"}
    if not len(known):
        return
    yield {**where, "value": float(known.mean())}
    if len(known) > 1 or len(resampled) > 1:
        low, high = ends(over_units(resampled))
        for end, side in (("low", float(low)), ("high", float(high))):
            if np.isfinite(side):
                yield {**where, "metric": f"{labels['metric']}_{end}", "value": side}


def _by_expert(
    parts: Mapping[str, list[tuple[pl.DataFrame, np.ndarray, np.ndarray]]],
) -> tuple[list[tuple[int, int]], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Each component by (layer, expert), the mean over an expert's matrices: values [U] and resamples [R or 1, U]."""
    gathered: dict[str, dict[tuple[int, int], list[tuple[float, np.ndarray]]]] = {}
    for name, tables in parts.items():
        for units, means, resampled in tables:
            for n, unit in enumerate(units.iter_rows(named=True)):
                if unit["expert"] is not None and unit["layer"] is not None:
                    key = (int(unit["layer"]), int(unit["expert"]))
                    gathered.setdefault(name, {}).setdefault(key, []).append((means[0, n], resampled[:, n]))
    experts = sorted({key for of in gathered.values() for key in of})
    values: dict[str, np.ndarray] = {}
    resamples: dict[str, np.ndarray] = {}
    for name in COMPONENTS:
        if name not in gathered:
            continue
        columns, drawn = [], []
        length = max(len(r) for found in gathered[name].values() for _, r in found)
        for key in experts:
            found = gathered[name].get(key, [])
            columns.append(_nanmean(np.array([v for v, _ in found])))
            each = [np.broadcast_to(r, length) for _, r in found] or [np.full(length, np.nan)]
            drawn.append(np.array([_nanmean(column) for column in np.stack(each).T]))
        values[name], resamples[name] = np.array(columns), np.stack(drawn, axis=1)
    return experts, values, resamples


def _nanmean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
