"""`gradreel study TRACE`: measures, ranking, and their report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

from ablations.study._measures import STATELESS, Measured, measure, replay_for_study
from ablations.study._page import write_pages
from ablations.study._score import COMPONENTS, RESAMPLES
from toolkit.frame import OPEN_LOOP_NOTE, FrameWriter, write_frame
from traces.errors import GradreelError
from traces.reader import Trace, open_trace

_RANKED = 20
HOW = (
    "Predicted harm is the mean of an expert's ranks, 0 to 1, by: stable rank of its gradient over the shorter side of "
    "the matrix (less is worse), tokens a step (fewer), signal to noise of its gradient over time (less), "
    "amplification by the stateless update (more), longest run of idle steps (longer). Nothing is weighted. It ranks "
    "experts of one trace; it is a prediction, and whether training agrees is another question: gradreel study "
    "--compare."
)
INTERVALS = (
    f"Intervals: 95%, {RESAMPLES} resamples of blocks of neighbouring recorded steps (moving-block bootstrap), for a "
    "role of its experts as well. Measures of the whole recording, such as signal to noise, have no interval for one "
    "expert, and enter the scores' resamples as they are."
)


@dataclass(frozen=True)
class Study:
    """The study of one trace: its Frame, the experts from the most to the least predicted harm, and where it lies."""

    frame: pl.DataFrame
    ranking: list[dict[str, Any]]
    path: Path
    headline: str


def study_trace(trace: Trace | str | Path, out: str | Path | None = None, *, progress: bool | None = None) -> Study:
    """Measure everything that `trace` allows, per role and expert, and rank experts by predicted harm.

    Writes study.parquet, report.html and report.md into the folder `out` (default NAME.study). Replay is open-loop: it
    compares updates, not losses. Errors: GradreelError for a trace without gradients and routing.
    """
    opened = trace if isinstance(trace, Trace) else open_trace(trace)
    target = Path(out) if out is not None else Path(f"{Path(opened.path).name.removesuffix('.trace')}.study")
    _make(target)
    with TemporaryDirectory(dir=target, prefix=".measuring-") as aside:
        result = replay_for_study(opened, Path(aside) / "measures.parquet", progress)
        found = measure(opened, result.lazy)
    with FrameWriter(constants={"run": opened.id}) as writer:
        writer.write(found.rows)
        frame = writer.close().collect()
    ranking = _ranking(found)
    headline = _headline(found, ranking)
    notes = [HOW, INTERVALS, *result.notes, f"{OPEN_LOOP_NOTE}."]
    about = {
        "kind": "study",
        "trace": {"path": str(opened.path), "id": opened.id, "steps": len(opened.steps)},
        "stateless": STATELESS,
        "notes": notes,
        "headline": headline,
    }
    write_frame(target / "study.parquet", frame, about)
    first, last = opened.steps[0], opened.steps[-1]
    write_pages(
        target,
        title=f"Temporal instability of {Path(opened.path).name}",
        question="Which experts would a stateless update harm, going by their gradients?",
        headline=headline,
        tables=[_ranking_table(ranking), *_role_tables(frame)],
        frame=frame,
        about="study",
        notes=notes,
        facts=[("trace", f"{opened.path}, {opened.id}"), ("steps", f"{len(opened.steps)}, {first} to {last}")],
    )
    return Study(frame, ranking, target, headline)


def _make(folder: Path) -> None:
    try:
        if (folder / "rank-00000").exists():
            raise GradreelError(f"{str(folder)!r} is a trace, whose files never change; give another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradreelError(f"cannot write a study into {str(folder)!r}: {error.strerror or error}") from None


def _ranking(found: Measured) -> list[dict[str, Any]]:
    order = sorted(range(len(found.experts)), key=lambda n: (-np.nan_to_num(found.scores[n], nan=-1.0), n))
    return [
        {
            "layer": found.experts[n][0],
            "expert": found.experts[n][1],
            "score": float(found.scores[n]),
            "low": float(found.low[n]),
            "high": float(found.high[n]),
            **{name: float(values[n]) for name, values in found.components.items()},
        }
        for n in order
    ]


def _headline(found: Measured, ranking: list[dict[str, Any]]) -> str:
    if not ranking:
        return "No expert could be ranked: the trace holds no experts' measures."
    worst = ranking[0]
    used = ", ".join(found.components)
    return (
        f"Of {len(ranking)} experts, expert {worst['expert']} of layer {worst['layer']} has the highest predicted harm "
        f"of a stateless update: {worst['score']:.2f} [{worst['low']:.2f}, {worst['high']:.2f}] by {used}."
    )


def _ranking_table(ranking: list[dict[str, Any]]) -> tuple[str, str, list[str], list[list[str]]]:
    names = [name for name in COMPONENTS if ranking and name in ranking[0]]
    header = ["layer, expert", "predicted harm", "95% interval", *(name.replace("_", " ") for name in names)]
    rows = [
        [
            f"{row['layer']}, {row['expert']}",
            f"{row['score']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            *(short(row[name]) for name in names),
        ]
        for row in ranking[:_RANKED]
    ]
    more = f" The {_RANKED} highest of {len(ranking)}." if len(ranking) > _RANKED else ""
    return "Experts by predicted harm", f"{HOW}{more}", header, rows


def _role_tables(frame: pl.DataFrame) -> list[tuple[str, str, list[str], list[list[str]]]]:
    """One table per role: every measure, its mean over the role's experts or parameters, and the interval."""
    means = frame.filter(pl.col("flag") == "mean")
    tables = []
    for role in means["role"].unique(maintain_order=True).to_list():
        mine = means.filter(pl.col("role").is_null() if role is None else pl.col("role") == role)
        cells = {(r["metric"], r["lag"]): r for r in mine.iter_rows(named=True)}
        rows = []
        for (name, lag), row in cells.items():
            if name.endswith(("_low", "_high")):
                continue
            low, high = (cells.get((f"{name}_{end}", lag)) for end in ("low", "high"))
            interval = "-" if low is None or high is None else f"{short(low['value'])} to {short(high['value'])}"
            label = name if lag is None else f"{name}, lag {lag}"
            rows.append([label, short(row["value"]), interval, row["unit"] or "1", f"{row['support']:.0f}"])
        title = "Layers and the run" if role is None else f"Role {str(role).replace('_', ' ')}"
        says = "Means over steps, then over experts or parameters. Update measures are those of the stateless update."
        tables.append((title, says, ["measure", "mean", "95% interval", "unit", "behind it"], sorted(rows)))
    return tables


def short(value: float | None) -> str:
    """Three significant digits; a dash for what is undefined."""
    return "-" if value is None or not np.isfinite(value) else f"{value:.3g}"
