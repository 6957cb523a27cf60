"""Prediction against outcome: conditions by predicted harm of a stateless update, beside what training showed.

A condition is a setting of an experiment, or a simulated world. Its predicted harm is the mean of its ranks among the
conditions of its source; its outcome is how much worse the stateless arm ended than the smoothed one, each at its own
best rate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ablations.runner._plan import arm_label
from ablations.stats import t_interval
from ablations.study._agreement import REPLAY_FILE, read_results
from ablations.study._page import Table, write_pages
from ablations.study._score import COMPONENTS, Correlation, harm_scores, spearman
from toolkit.frame import FrameWriter, read_frame, write_frame
from traces.console import say
from traces.errors import GradreelError

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
HARM, GAP, RHO = "condition_harm", "condition_gap", "condition_rho"
#: Expressions of the two arms of a comparison, without the AdamW of other roles.
_STATELESS = ("sinkgd(alpha=1.0)",)
_SMOOTHED = ("mesh", "mesh(idle=skip)")
#: What a world's frame says of it, by component; an idle step is one without tokens, so its share orders idle runs.
_OF_WORLDS = {"tokens_per_expert": "world.tokens_over_min_side", "idle_run_length": "world.activity"}
SOURCES = ("presets", "simulations")
_CAVEAT = {
    "presets": (
        "Settings of experiments; those that share the very runs count once. Others with the same model, data and "
        "tokens are one regime seen several times, so there is less evidence than there are points."
    ),
    "simulations": (
        "Worlds of simulations, whose reference frames hold no signal to noise and no amplification: the prediction "
        "rests on tokens, the gradient's stable rank and the share of idle steps. Worlds of one simulation share their "
        "design, so the interval, which takes them as independent, is too narrow."
    ),
}


_OUTCOME = (
    "Outcome: loss of the stateless arm minus that of the smoothed one, each at its own best rate; in simulations the "
    "logarithm of the ratio of their risks."
)


@dataclass(frozen=True)
class Condition:
    """One setting or world. `gap` [nats, or log of the ratio of risks], above 0: the stateless arm did worse.

    `runs` tell the runs behind the gap from others, where they are known.
    """

    source: str
    name: str
    unit: str
    components: dict[str, float]
    gap: float
    low: float | None
    high: float | None
    runs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Comparison:
    """All conditions, their predicted harm by source, the correlations by (source, measure), and the Frame."""

    conditions: list[Condition]
    correlations: dict[tuple[str, str], Correlation]
    frame: pl.DataFrame
    headline: str
    path: Path | None


def compare_predictions(folders: Sequence[str | Path] = (), out: str | Path | None = None) -> Comparison:
    """Rank-correlate predicted harm with the loss gap, over presets' results and simulations, whatever comes out.

    `folders` are results of experiments (with replay.parquet, which `gradreel study FOLDER` writes) or of simulations;
    none means all reference results. Writes prediction.parquet, report.html and report.md into `out`, if given.
    Errors: GradreelError where no condition is found.
    """
    conditions: list[Condition] = []
    for folder in [Path(f) for f in folders] or _references():
        conditions.extend(_conditions(folder))
    conditions = _distinct(conditions)
    if not conditions:
        raise GradreelError(
            "no condition to compare: no folder holds results with a stateless and a smoothed arm; give results of "
            "`gradreel run` on which `gradreel study` was run, or of `gradreel simulate`"
        )
    rows: list[dict[str, Any]] = []
    correlations: dict[tuple[str, str], Correlation] = {}
    for source in SOURCES:
        mine = [c for c in conditions if c.source == source]
        if mine:
            rows.extend(_rows(source, mine, correlations))
    with FrameWriter() as writer:
        writer.write(rows)
        frame = writer.close().collect()
    headline = " ".join(
        f"{source.capitalize()}: rank correlation of predicted harm and outcome {found.words}."
        for (source, measure), found in correlations.items()
        if measure == HARM
    )
    place = None if out is None else Path(out)
    if place is not None:
        _write(place, frame, headline, conditions, correlations)
    return Comparison(conditions, correlations, frame, headline, place)


def _references() -> list[Path]:
    return sorted(p.parent for p in REFERENCE.rglob("provenance.json"))


def _distinct(conditions: list[Condition]) -> list[Condition]:
    """Conditions of the same runs, which experiments share, are one: its components are their means."""
    found: list[Condition] = []
    for one in conditions:
        same = [c for c in conditions if c.runs == one.runs] if one.runs else [one]
        if one is not same[0]:
            continue
        names = [name for name in COMPONENTS if all(name in c.components for c in same)]
        means = {name: float(np.mean([c.components[name] for c in same])) for name in names}
        found.append(replace(one, name=", ".join(c.name for c in same), components=means))
    return found


def _conditions(folder: Path) -> list[Condition]:
    try:
        about = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise GradreelError(
            f"{str(folder)!r} holds no results; give a folder that `run` or `simulate` filled"
        ) from None
    if about.get("kind") == "ablation":
        return _of_experiment(folder)
    if "simulation" in about:
        return _of_simulation(folder, about)
    return []


def _of_experiment(folder: Path) -> list[Condition]:
    """One condition per setting that has both arms and a studied reel."""
    about = read_results(folder)
    arms = {name: arm["recipe"] for name, arm in about["arms"].items() if arm.get("routing", "live") == "live"}
    stateless = next((name for name, text in arms.items() if text in _STATELESS), None)
    smoothed = next((name for name, text in arms.items() if text in _SMOOTHED), None)
    if stateless is None or smoothed is None or not about["experts_only"]:
        return []
    if not (folder / REPLAY_FILE).is_file():
        say(f"{about['preset']} has no {REPLAY_FILE}; make it with: gradreel study {folder}")
        return []
    reel = read_frame(folder / REPLAY_FILE).filter((pl.col("run") == "reel") & pl.col("expert").is_null())
    losses = read_frame(folder / "frame.parquet").filter(
        (pl.col("metric") == "paired_difference") & (pl.col("run") == "tuned")
    )
    found = []
    for setting in about["size"]["settings"]:
        gaps = _gaps(losses, arm_label(setting, stateless), arm_label(setting, smoothed), about["baseline"], setting)
        mine = reel.filter(pl.col("arm").eq_missing(pl.lit(setting or None, dtype=pl.String)))
        values = {str(r["metric"]).removeprefix("component."): r["value"] for r in mine.iter_rows(named=True)}
        components = {name: values[name] for name in COMPONENTS if values.get(name) is not None}
        if gaps and components:
            low, high = t_interval(gaps)
            name = about["preset"] + (f" {setting}" if setting else "")
            runs = _runs(about, [arm_label(setting, arm) for arm in (stateless, smoothed)])
            found.append(Condition("presets", name, "nats", components, float(np.mean(gaps)), low, high, runs))
    return found


def _runs(about: dict[str, Any], labels: list[str]) -> frozenset[str]:
    """Seeds and losses of these arms' runs at their best rates: equal ones are the same runs, whatever their names."""
    best = {label: (about.get("tuning") or {}).get(label, {}).get("best") for label in labels}
    return frozenset(
        f"{entry['seed']} {entry['final_loss']!r}"
        for entry in about["table"].values()
        if entry["matched"] is None and any(e == entry["lr"] for e in [best.get(entry["arm"])] if e is not None)
    )


def _gaps(losses: pl.DataFrame, stateless: str, smoothed: str, baseline: str, setting: str) -> list[float]:
    """Loss of the stateless arm minus that of the smoothed one, by seed; the baseline's difference is 0."""

    def of(arm: str) -> dict[int, float] | None:
        if arm == arm_label(setting, baseline):
            return None
        rows = losses.filter((pl.col("arm") == arm) & pl.col("value").is_not_null())
        return dict(rows.select("seed", "value").iter_rows())

    one, other = of(stateless), of(smoothed)
    seeds = sorted((one if one is not None else other or {}).keys())
    pairs = [(0.0 if one is None else one[s], 0.0 if other is None else other.get(s)) for s in seeds]
    return [a - b for a, b in pairs if b is not None]


def _of_simulation(folder: Path, about: dict[str, Any]) -> list[Condition]:
    """One condition per world that has the smoothed arm."""
    frame = read_frame(folder / "frame.parquet")
    smoothed = next((name for name in about["arms"] if name == "mesh"), None)
    if smoothed is None:
        return []
    cells = {
        (r["run"], r["metric"], r["arm"]): r["value"]
        for r in frame.filter(pl.col("seed").is_null() & ~pl.col("run").str.contains(";")).iter_rows(named=True)
    }
    found = []
    for world in frame.filter(pl.col("metric") == "risk_ratio_tuned")["run"].unique(maintain_order=True).to_list():
        ratios = [cells.get((world, f"risk_ratio_tuned{end}", smoothed)) for end in ("", "_low", "_high")]
        rank = cells.get((world, "stable_rank", about["baseline"]))
        sides = [cells.get((world, f"world.{name}", None)) for name in ("rows", "columns")]
        sound = [r for r in ratios if r is not None and r > 0]
        lengths = [s for s in sides if s is not None]
        if len(sound) < len(ratios) or len(lengths) < len(sides):
            continue
        components = {name: cells.get((world, metric, None)) for name, metric in _OF_WORLDS.items()}
        components["stable_rank_share"] = None if rank is None else rank / min(lengths)
        idle = components.pop("idle_run_length")
        components["idle_run_length"] = None if idle is None else 1 - idle
        known = {name: float(v) for name, v in components.items() if v is not None}
        gap, low, high = (float(np.log(r)) for r in sound)
        found.append(Condition("simulations", f"{about['simulation']} {world}", "log ratio", known, gap, low, high))
    return found


def _rows(source: str, mine: list[Condition], correlations: dict[tuple[str, str], Correlation]) -> list[dict[str, Any]]:
    """Rows of one source, whose correlations are added to `correlations`. `arm` is the source, `run` the condition."""
    names = [name for name in COMPONENTS if any(name in c.components for c in mine)]
    table = {name: np.array([c.components.get(name, np.nan) for c in mine]) for name in names}
    gaps = np.array([c.gap for c in mine])
    scores = harm_scores(table)
    correlations[source, HARM] = spearman(scores, gaps)
    for name, values in table.items():
        correlations[source, name] = spearman(values, gaps)
    rows: list[dict[str, Any]] = []
    for n, condition in enumerate(mine):
        where = {"run": condition.name, "arm": source, "unit": condition.unit}
        rows.append({**where, "metric": HARM, "value": float(scores[n]), "unit": "1"})
        ends = (("", condition.gap), ("_low", condition.low), ("_high", condition.high))
        rows.extend({**where, "metric": f"{GAP}{end}", "value": value} for end, value in ends)
        rows.extend(
            {**where, "metric": f"component.{name}", "value": v, "unit": "1"}
            for name, v in condition.components.items()
        )
    for (of, name), found in correlations.items():
        if of == source:
            at: dict[str, Any] = {"arm": source, "param": name, "support": found.n, "unit": "1"}
            flag = "undefined" if found.rho is None else ""
            rows.append({**at, "metric": RHO, "value": found.rho, "flag": flag})
            known = (("low", found.low), ("high", found.high), ("p", found.p))
            rows.extend({**at, "metric": f"{RHO}_{end}", "value": v} for end, v in known if v is not None)
    return rows


def _write(
    place: Path,
    frame: pl.DataFrame,
    headline: str,
    conditions: list[Condition],
    correlations: dict[tuple[str, str], Correlation],
) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradreelError(f"cannot write into {str(place)!r}: {error.strerror or error}") from None
    notes = [_CAVEAT[source] for source in SOURCES if any(c.source == source for c in conditions)]
    write_frame(place / "prediction.parquet", frame, {"kind": "prediction", "headline": headline, "notes": notes})
    lines = [
        [source, "all, mean rank" if name == HARM else name.replace("_", " "), _expected(name), found.words]
        for (source, name), found in correlations.items()
    ]
    says = (
        "Spearman's rank correlation over conditions between what was predicted and how much worse the stateless arm "
        "ended. Interval: Bonett and Wright 2000; p by permutation, not corrected for the number of measures."
    )
    harm = {(r["arm"], r["run"]): r["value"] for r in frame.filter(pl.col("metric") == HARM).iter_rows(named=True)}
    table = [
        [c.source, c.name, f"{harm[c.source, c.name]:.2f}", f"{c.gap:+.4f} {c.unit}", _interval(c)] for c in conditions
    ]
    tables: list[Table] = [
        ("Rank correlations", says, ["source", "prediction", "sign if it holds", "rank correlation"], lines),
        (
            "Conditions",
            _OUTCOME,
            ["source", "condition", "predicted harm", "outcome", "95% interval"],
            table,
        ),
    ]
    write_pages(
        place,
        title="Predicted harm against outcome",
        question="Do measures of gradients foretell where a stateless update does worse than a smoothed one?",
        headline=headline,
        tables=tables,
        frame=frame,
        about="prediction",
        notes=notes,
        facts=[("conditions", str(len(conditions)))],
    )


def _expected(name: str) -> str:
    return "+" if name == HARM or COMPONENTS[name] > 0 else "-"


def _interval(condition: Condition) -> str:
    if condition.low is None or condition.high is None:
        return "-"
    return f"{condition.low:+.4f} to {condition.high:+.4f}"
