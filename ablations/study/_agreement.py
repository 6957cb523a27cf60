"""Replay against closed loop: the baseline's reel replayed through an experiment's arms, beside what they trained to.

Replay is open-loop: it compares updates, not losses. Here the two stand side by side, arm by arm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

from ablations.runner._plan import arm_label
from ablations.runner._spec import RunSpec, run_spec
from ablations.runner._store import finished
from ablations.study._measures import measure, replay_for_study
from ablations.study._score import Correlation, spearman
from toolkit.frame import OPEN_LOOP_NOTE, FrameWriter, write_frame
from traces.console import say
from traces.errors import GradreelError

Table = tuple[str, str, Sequence[str], list[Sequence[str]]]
REPLAY_FILE = "replay.parquet"
#: Measures of the update that a replay can take, with the lag at which they are compared.
MEASURES: dict[str, int | None] = {
    "update_cos": 1,
    "update_sign_flip_rate": 1,
    "update_rms": None,
    "amplification": None,
    "cos_to_gradient": None,
    "relative_update": None,
    "stable_rank": None,
    "straightness": None,
    "zombie_displacement": None,
}
_WAYS = ("tuned", "shared")
_BURSTS = 3
RHO = "open_closed_rho"


@dataclass(frozen=True)
class Agreed:
    """The rank correlation, over the arms, of one measure with the losses of one way under one setting."""

    way: str
    setting: str
    measure: str
    found: Correlation


def replay_results(
    folder: str | Path, *, steps: int = 32, out: str | Path | None = None, progress: bool | None = None
) -> list[Agreed]:
    """Record the baseline's best run of the results in `folder` anew, replay it through all arms, and compare.

    Per setting, three bursts of `steps` steps are recorded, evenly spread over the run, and thrown away afterwards;
    state starts anew in each. Writes replay.parquet into `folder` (or `out`), of which `gradreel report` makes a
    section: the arms' measures, the correlations (`open_closed_rho`), and the study of the reel itself. Errors:
    GradreelError where `folder` holds no results of an experiment, or its runs cannot be told.
    """
    root = Path(folder)
    provenance = read_results(root)
    if steps < 2:
        raise GradreelError(f"steps is {steps}; allowed: at least 2, since measures over time need neighbours")
    losses = _losses(root)
    rows: list[dict[str, Any]] = []
    agreed: list[Agreed] = []
    for setting in provenance["size"]["settings"]:
        spec = baseline_run(root, provenance, setting)
        say(f"recording {spec.recipe} at lr {spec.lr:g}, seed {spec.seed}{f', {setting}' if setting else ''}")
        values, own = _open_loop(spec, provenance, setting, steps, progress)
        rows.extend(own)
        for way in _WAYS:
            agreed.extend(_agreement(way, setting, values, losses.get(way, {}), provenance))
    rows.extend(agreement_rows(agreed))
    with FrameWriter() as writer:
        writer.write(rows)
        frame = writer.close().collect()
    about = {"kind": "open and closed loop", "preset": provenance["preset"], "notes": [f"{OPEN_LOOP_NOTE}."]}
    target = Path(out) if out is not None else root
    target.mkdir(parents=True, exist_ok=True)
    write_frame(target / REPLAY_FILE, frame, about | {"steps": steps, "bursts": _BURSTS})
    return agreed


def read_results(root: Path) -> dict[str, Any]:
    """The provenance of an experiment's results."""
    try:
        found: dict[str, Any] = json.loads((root / "provenance.json").read_text(encoding="utf-8"))
        if found["kind"] == "ablation":
            return found
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise GradreelError(f"{str(root)!r} holds no results of an experiment; give the folder that `run` filled")


def baseline_run(root: Path, provenance: Mapping[str, Any], setting: str) -> RunSpec:
    """The baseline's run at its best rate (else at the shared one) from the first seed that has it."""
    label = arm_label(setting, provenance["baseline"])
    best = (provenance.get("tuning") or {}).get(label, {}).get("best")
    for run_id, entry in provenance["table"].items():
        fits = entry["arm"] == label and entry["matched"] is None and entry["lr"] == (best or entry["lr"])
        if not fits or entry["final_loss"] is None:
            continue
        known = finished(root, run_id)
        if known is not None:
            return RunSpec.from_dict(known.spec)
        spec = _rebuilt(provenance, setting, entry["lr"], entry["seed"])
        if spec.id == run_id:
            return spec
        raise GradreelError(f"run {run_id} is not in {str(root)!r} and the preset has changed since; run it again")
    raise GradreelError(f"no run of {label} ended in {str(root)!r}, so there is nothing to record")


def _rebuilt(provenance: Mapping[str, Any], setting: str, lr: float, seed: int) -> RunSpec:
    from ablations.presets import load_preset
    from ablations.runner._spec import ALL, EXPERTS

    preset = load_preset(provenance["preset"])
    size = preset.size(provenance.get("size_name", "cpu")).under(setting)
    measured = EXPERTS if preset.experts_only else ALL
    return run_spec(size, preset.expression(preset.baseline, size), lr, seed, measured=measured)


def _open_loop(
    spec: RunSpec, provenance: Mapping[str, Any], setting: str, steps: int, progress: bool | None
) -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
    """{measure: {arm: value}} of the arms on the recorded run, and rows of them and of the reel's own study."""
    from ablations.runner._reel import record_run
    from toolkit.replay import replay
    from traces.reader import open_trace
    from traces.record_at import RecordAt

    recipes = arm_recipes(provenance, setting)
    with TemporaryDirectory(prefix="gradreel-reel-") as aside:
        path = Path(aside) / "baseline.trace"
        period = max(steps, spec.steps // _BURSTS)
        record_run(spec, path, RecordAt(bursts=(steps, period), roles=("routed_expert",), budget=None))
        trace = open_trace(path)
        gaps = None if trace.contiguous() else "bursts"
        names = list(MEASURES)
        result = replay(trace, recipes, names, gaps=gaps, lags=1, progress=progress)
        means = result.frame.filter(pl.col("flag").cast(pl.String).is_in(("", "mean")) & pl.col("value").is_not_null())
        study = measure(trace, replay_for_study(trace, Path(aside) / "study.parquet", progress).lazy)
    rows: list[dict[str, Any]] = []
    values: dict[str, dict[str, float]] = {}
    for name in names:
        mine = means.filter(pl.col("metric") == name)
        at_steps = mine.filter(pl.col("step").is_not_null())
        chosen = mine if at_steps.is_empty() else at_steps
        for arm in recipes:
            found = chosen.filter(pl.col("recipe") == arm)["value"].mean()
            if found is not None:
                values.setdefault(name, {})[arm] = float(found)  # type: ignore[arg-type]
                where = {"run": "open loop", "arm": arm_label(setting, arm), "recipe": arm, "role": "routed_expert"}
                rows.append({**where, "metric": f"open.{name}", "value": float(found), "unit": "1"})  # type: ignore[arg-type]
    kept = [row for row in study.rows if str(row["metric"]).startswith(("component.", "predicted_harm"))]
    rows.extend({**row, "run": "reel", "arm": setting or None} for row in kept)
    return values, rows


def arm_recipes(provenance: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """Every arm's recipe at its own best rate, the baseline first; those on recorded routing differ in none."""
    from toolkit.variants import recipe

    size, arms = provenance["size"], provenance["arms"]
    rest = (size["settings"].get(setting) or {}).get("rest_lr", size["rest_lr"])
    order = sorted(arms, key=lambda arm: arm != provenance["baseline"])
    found = {}
    for arm in order:
        if arms[arm].get("routing", "live") != "live":
            continue
        best = (provenance.get("tuning") or {}).get(arm_label(setting, arm), {}).get("best")
        text = arms[arm]["recipe"] + (f"+adam_rest({rest!r})" if provenance["experts_only"] else "")
        found[arm] = recipe(text, lr=best or size["shared_lr"])
    return found


def _losses(root: Path) -> dict[str, dict[str, float]]:
    """Mean paired difference to the baseline by way and arm's label, nats."""
    from toolkit.frame import read_frame

    rows = read_frame(root / "frame.parquet").filter(pl.col("metric") == "paired_difference")
    means = rows.group_by("run", "arm").agg(pl.col("value").mean())
    found: dict[str, dict[str, float]] = {}
    for way, arm, value in means.iter_rows():
        if value is not None:
            found.setdefault(way, {})[arm] = value
    return found


def _agreement(
    way: str,
    setting: str,
    values: Mapping[str, Mapping[str, float]],
    losses: Mapping[str, float],
    provenance: Mapping[str, Any],
) -> list[Agreed]:
    closed = {arm: losses.get(arm_label(setting, arm), np.nan) for arm in provenance["arms"]}
    closed[provenance["baseline"]] = 0.0
    if all(np.isnan(v) for arm, v in closed.items() if arm != provenance["baseline"]):
        return []
    found = []
    for name, by_arm in values.items():
        arms = list(by_arm)
        pair = (np.array([by_arm[arm] for arm in arms]), np.array([closed[arm] for arm in arms]))
        found.append(Agreed(way, setting, name, spearman(*pair)))
    return found


def agreement_rows(agreed: list[Agreed]) -> list[dict[str, Any]]:
    """As rows of the Frame: `run` is the way, `arm` the setting, `param` the measure, `support` the number of arms."""
    rows = []
    for one in agreed:
        where = {"run": one.way, "arm": one.setting or None, "param": one.measure, "support": one.found.n, "unit": "1"}
        ends = (("", one.found.rho), ("_low", one.found.low), ("_high", one.found.high))
        for end, value in ends:
            flag = "undefined" if value is None else ""
            rows.append({**where, "metric": f"{RHO}{end}", "value": value, "flag": flag})
        rows.append({**where, "metric": "open_closed_p", "value": one.found.p})
    return rows


def agreement_tables(frame: pl.DataFrame) -> list[Table]:
    """What replay.parquet says, as tables of a report: correlations first, then each arm's measures."""
    rows = frame.filter(pl.col("metric") == RHO)
    cells = {(r["metric"], r["run"], r["arm"], r["param"]): r["value"] for r in frame.iter_rows(named=True)}
    lines: list[Sequence[str]] = []
    for row in rows.iter_rows(named=True):
        key = (row["run"], row["arm"], row["param"])
        low, high, p = (cells.get((name, *key)) for name in (f"{RHO}_low", f"{RHO}_high", "open_closed_p"))
        found = Correlation(row["value"], low, high, p, int(row["support"]))
        lines.append([row["param"], row["run"] + (f", {row['arm']}" if row["arm"] else ""), found.words, _says(found)])
    lines.sort(key=lambda line: (line[1], line[0]))
    most = max((int(r) for r in rows["support"].to_list()), default=0)
    says = (
        f"{OPEN_LOOP_NOTE}. The baseline's best run was recorded and replayed through the arms. Each measure, the mean "
        "over routed experts and recorded steps, is correlated by rank with the final loss over the arms: +1 means "
        f"that arms with more of it ended higher. There are at most {most} arms, so a correlation must be large to "
        "say anything; p is not corrected for the number of measures."
    )
    found_tables: list[Table] = [
        ("Replay against closed loop", says, ["measure", "compared", "rank correlation", "agreed"], lines)
    ]
    open_rows = frame.filter(pl.col("metric").str.starts_with("open."))
    names = sorted(open_rows["metric"].unique().to_list())
    by_arm = {(r["arm"], r["metric"]): r["value"] for r in open_rows.iter_rows(named=True)}
    table: list[Sequence[str]] = []
    for arm in open_rows["arm"].unique(maintain_order=True).to_list():
        table.append([arm, *("-" if (v := by_arm.get((arm, n))) is None else f"{v:.3g}" for n in names)])
    header = ["arm", *(name.removeprefix("open.").replace("_", " ") for name in names)]
    found_tables.append(("The arms on the baseline's reel", f"{OPEN_LOOP_NOTE}.", header, table))
    return found_tables


def _says(found: Correlation) -> str:
    if found.rho is None:
        return "undefined: fewer than three arms, or all alike"
    if found.p is None or found.p > 0.05:
        return "not decided"
    return "more of it, higher loss" if found.rho > 0 else "more of it, lower loss"
