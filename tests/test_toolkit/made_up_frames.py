"""Frames with planted answers, made without a trace, a recipe or a metric.

Not a test file: `test_plots.py`, `test_report.py` and the plot contract load it by path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from toolkit.frame import SCHEMA

#: recipe -> (cosine at lag 1, update RMS, fall of amplification, zombie displacement, state bytes, pinned bytes)
RECIPES: dict[str, tuple[float, float, float, float, int, int]] = {
    "adamw": (0.82, 0.30, 0.15, 0.020, 2 * 9_437_184, 0),
    "sgd": (0.10, 0.004, 0.0, 0.0, 0, 0),
    "skewadam": (0.74, 0.35, 0.2, 0.011, 1_300_000, 0),
    "sinkgd": (0.11, 1.0, 0.9, 0.0, 0, 0),
    "mesh": (0.70, 1.0, 0.5, 0.0, 0, 9_437_184),
    "mesh+sign_only": (0.55, 1.0, 0.5, 0.0, 0, 9_437_184),
    "mesh+smaller_steps(0.3)": (0.70, 0.3, 0.5, 0.0, 0, 9_437_184),
    "sinkgd+regrouped(stacked)": (0.13, 1.0, 0.7, 0.0, 0, 0),
}
SUMMARY_FLAGS = ("mean", "p10", "p50", "p90")


def made_up_frame(
    *,
    recipes: Mapping[str, tuple[float, float, float, float, int, int]] | None = None,
    steps: Sequence[int] = tuple(range(1, 25)),
    experts: int = 8,
    layers: int = 2,
    lags: Sequence[int] = (1, 2, 4, 8),
    summaries: bool = False,
    noise: float = 0.08,
    scale: float = 1.0,
    seed: int = 0,
    run: str = "demo-3f9a1c",
) -> pl.DataFrame:
    """A Frame with every metric that a plot or the report reads; `summaries` replaces rows per expert."""
    rng = np.random.default_rng(seed)
    table = RECIPES if recipes is None else recipes
    rows: list[dict[str, Any]] = []

    def add(metric: str, values: Any, *, unit: str = "1", support: Any = None, **where: Any) -> None:
        values = np.atleast_1d(np.asarray(values, dtype=float)) * scale
        stacked = where.pop("stacked", where.get("role") == "routed_expert")
        base = {"run": run, "arm": None, "seed": 0, "metric": metric, "unit": unit, "flag": "", **where}
        if values.size == 1 and not stacked:
            rows.append({**base, "value": values[0], "support": None if support is None else float(support)})
        elif summaries:
            numbers = [values.mean(), *np.quantile(values, (0.1, 0.5, 0.9))]
            rows.extend({**base, "value": v, "flag": f} for v, f in zip(numbers, SUMMARY_FLAGS, strict=True))
        else:
            held = [None] * values.size if support is None else np.broadcast_to(support, values.shape).tolist()
            rows.extend({**base, "expert": e, "value": v, "support": held[e]} for e, v in enumerate(values))

    def near(centre: float, low: float = -1.0, high: float = 1.0, count: int = experts) -> np.ndarray:
        return np.clip(centre + noise * rng.standard_normal(count), low, high)

    popularity = rng.dirichlet(np.full(experts, 0.9), size=layers)
    for layer in range(layers):
        tokens = {}
        for step in steps:
            share = popularity[layer] * np.exp(0.5 * np.sin(step / 9 + np.arange(experts)))
            tokens[step] = rng.multinomial(4096, share / share.sum())
            at = {"step": int(step), "layer": layer, "stacked": True}
            add("tokens_per_expert", tokens[step], unit="tokens", **at)
            add("expert_load", tokens[step] / 4096, **at)
        for name in ("gate_up_proj", "down_proj"):
            where = {"layer": layer, "role": "routed_expert", "param": f"layers.{layer}.experts.{name}"}
            _over_time(add, near, steps, lags, 0.15, where)
            for recipe, (cos, rms, slope, zombie, state, pinned) in table.items():
                mine = {**where, "recipe": recipe}
                for step in steps:
                    add("update_rms", rms * near(1.0, 0.1, 9.0) * (1 + 0.3 / step), step=int(step), **mine)
                    few = np.maximum(tokens[step], 1) / 512
                    ratio = rms * few**-slope * np.exp(noise * rng.standard_normal(experts))
                    ratio[tokens[step] == 0] = np.nan
                    add("amplification", ratio, step=int(step), support=tokens[step], **mine)
                    add("stable_rank", near(9.0, 1.0, 64.0), step=int(step), **mine)
                _lagged(add, "update_cos", lambda lag, c=cos: near(c ** (lag**0.5)), steps, lags, mine)
                _lagged(add, "update_sign_flip_rate", lambda lag, c=cos: near((1 - c) / 2, 0, 1), steps, lags, mine)
                add("zombie_displacement", near(zombie, 0, 9) if zombie else np.zeros(experts), **mine)
                add("cos_to_reference", near(1.0 if recipe == "adamw" else cos * 0.6), step=int(steps[-1]), **mine)
                for metric in ("path_length", "displacement"):
                    add(metric, near(rms * len(steps), 0, 1e9), **mine)
                add("straightness", near(cos, 0, 1), **mine)
                for step in steps:
                    add("drift_from_reference", near(rms, 0, 9) * (recipe != "adamw"), step=int(step), **mine)
                everything = {**mine, "role": "routed_expert"}
                rows.append(_cost("state_bytes", state / (2 * layers), run, everything))
                rows.append(_cost("pinned_gradient_bytes", pinned / (2 * layers), run, everything))
        router = {"layer": layer, "role": "router", "param": f"layers.{layer}.router"}
        _over_time(add, lambda c, low=-1.0, high=1.0: near(c, low, high, 1), steps, lags, 0.45, router)
        for recipe, (cos, rms, *_rest) in table.items():
            for step in steps:
                add("update_rms", rms * near(1.0, 0.1, 9.0, 1), step=int(step), **router, recipe=recipe)
            both = {**router, "recipe": recipe}
            _lagged(add, "update_cos", lambda lag, c=cos: near(0.3 + 0.6 * c ** (lag**0.5), count=1), steps, lags, both)
    rows.extend(_trajectories(list(table), steps, scale, run))
    rows.extend(_experiment(table, steps, scale))
    for model, size in ((run, 1e8), (f"{run};large", 1e10)):
        for recipe in table:
            plan = {"run": model, "recipe": recipe}
            rows.append({**plan, "metric": "parameters", "unit": "1", "value": size})
            rows.append({**plan, "metric": "peak_bytes", "unit": "B", "value": 9 * size * scale})
    for number, (tokens, activity) in enumerate(itertools.product((0.04, 0.3, 4.0), (0.1, 0.5, 1.0))):
        world = {"run": f"{run};world-{number}", "metric": "world.tokens_over_min_side", "unit": "1"}
        rows.append({**world, "value": tokens * scale})
        rows.append({**world, "metric": "world.activity", "value": activity})
        for arm, low, high in (("mesh", 1.2, 1.6), ("rms", 0.9, 1.3)):
            for end, factor in (("", 1.1), ("_low", low), ("_high", high)):
                ratio = {"metric": f"risk_ratio_tuned{end}", "value": factor / (tokens + activity) * scale}
                rows.append({**world, **ratio, "arm": arm, "recipe": arm, "role": "routed_expert"})
    rows.extend(_studied(table, experts, layers, scale))
    return as_frame(rows)


def _trajectories(recipes: Sequence[str], steps: Sequence[int], scale: float, run: str) -> Iterator[dict[str, Any]]:
    """Rows of ways in a plane and of pairs of recipes; one recipe has no other."""
    for number, recipe in enumerate(recipes):
        for role, step in itertools.product(("routed_expert", "router"), steps):
            row = {"run": run, "role": role, "step": int(step), "unit": "weight"}
            for name, value in (("along", step), ("across", number * step / 2), ("off", number / 3)):
                yield {**row, "recipe": recipe, "metric": f"plane_{name}", "value": value * scale}
            for other in recipes[number + 1 :] or ([recipe] if len(recipes) == 1 else []):
                pair = {**row, "recipe": f"{recipe} vs {other}"}
                yield {**pair, "metric": "pairwise_weight_distance", "value": (number + 1) * step * scale}
                yield {**pair, "metric": "pairwise_update_cos", "value": 0.4 * scale, "unit": "1"}


def _studied(recipes: Iterable[str], experts: int, layers: int, scale: float) -> Iterator[dict[str, Any]]:
    """Rows of a study: experts by predicted harm, conditions against outcomes, measures against losses."""
    ends = (("", 0.0), ("_low", -0.1), ("_high", 0.1))
    for layer, expert in itertools.product(range(layers), range(experts)):
        for end, shift in ends:
            place = {"role": "routed_expert", "layer": layer, "expert": expert, "unit": "1"}
            yield {**place, "metric": f"predicted_harm{end}", "value": (expert / experts + shift) * scale}
    for source, number in itertools.product(("presets", "simulations"), range(4)):
        at = {"run": f"condition-{number}", "arm": source, "unit": "nats"}
        yield {**at, "metric": "condition_harm", "value": number / 4 * scale}
        for end, shift in ends:
            yield {**at, "metric": f"condition_gap{end}", "value": (0.1 * number + shift) * scale}
        yield {**at, "run": None, "param": "condition_harm", "metric": "condition_rho", "value": 0.8 * scale}
    for way, measure in itertools.product(("shared", "tuned"), ("update_cos", "update_rms")):
        for end, shift in ends:
            at = {"run": way, "param": measure, "unit": "1"}
            yield {**at, "metric": f"open_closed_rho{end}", "value": (0.4 + 3 * shift) * scale}


def as_frame(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """Rows with any of the Frame's columns as a Frame; NaN becomes null, as the metrics write it."""
    full = [{name: row.get(name) for name in SCHEMA} for row in rows]
    for row in full:
        row["flag"] = row["flag"] or ""
        if row["value"] is not None and np.isnan(row["value"]):
            row["value"] = None
    return pl.DataFrame(full, schema=SCHEMA)


def _experiment(recipes: Iterable[str], steps: Sequence[int], scale: float) -> Iterator[dict[str, Any]]:
    """Rows of closed-loop runs: a grid of three rates, and two seeds of each way of comparing."""
    for place, recipe in enumerate(recipes):
        for lr, seed in ((1e-3, 0), (3e-3, 0), (9e-3, 0), (3e-3, 1)):
            run = {"run": f"{recipe};{lr};{seed}", "arm": recipe, "recipe": recipe, "seed": seed}
            ways = ["grid"] * (seed == 0) + ["shared", "tuned", "matched"] * (lr == 3e-3)
            yield {**run, "metric": "peak_lr", "value": lr * scale, "unit": "1"}
            for way in ways:
                yield {**run, "metric": f"in_{way}", "value": 1.0, "unit": "count"}
            for step in steps:
                loss = (2 + 0.1 * place + abs(lr - 3e-3) * 20 + 1 / step) * scale
                yield {**run, "metric": "valid_loss", "value": loss, "step": int(step), "unit": "nats"}
                yield {**run, "metric": "delta_rms", "value": lr / step * scale, "step": int(step), "unit": "weight"}
        for way in ("shared", "tuned", "matched"):
            row = {"run": way, "arm": recipe, "recipe": recipe, "unit": "nats"}
            for name, seed, value in (("", 0, 0.1), ("", 1, 0.2), ("_low", None, -0.1), ("_high", None, 0.4)):
                yield {**row, "metric": f"paired_difference{name}", "seed": seed, "value": value * scale}


def _over_time(add: Any, near: Any, steps: Any, lags: Any, cos: float, where: Mapping[str, Any]) -> None:
    _lagged(add, "grad_cos", lambda lag: near(cos / lag**0.3), steps, lags, where)
    _lagged(add, "sign_flip_rate", lambda lag: near(0.5 - cos / 3 / lag**0.3, 0, 1), steps, lags, where)


def _lagged(add: Any, metric: str, value: Any, steps: Any, lags: Any, where: Mapping[str, Any]) -> None:
    """Rows per step at the smallest lag and one row over the recording at every lag, as the lagged metrics write."""
    for step in list(steps)[min(lags) :]:
        add(metric, value(min(lags)), step=int(step), lag=min(lags), **where)
    for lag in lags:
        if len(steps) > lag:
            add(metric, value(lag), lag=lag, **where)


def _cost(metric: str, value: float, run: str, where: Mapping[str, Any]) -> dict[str, Any]:
    return {"run": run, "metric": metric, "value": value, "unit": "bytes", **where}
