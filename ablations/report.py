"""The report of an experiment: what decides it first, then figures, tables and where all of it came from.

Everything is taken from the results' Frame and provenance, so that a report can be written again anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from traces.errors import GradreelError

_FIGURES = ("paired_differences", "lr_sensitivity", "loss_curves", "delta_rms_curves")
WAY_TITLES = {
    "shared": "All arms at one lr",
    "tuned": "Each arm at its own best lr",
    "matched": "With the baseline's sizes of weight change",
}
_SAYS = {
    "shared": "Says what one rate does to every arm; arms that want another rate look worse than they are.",
    "tuned": "Says what each arm can do. The best rate is chosen on the tuning seeds, which are compared as well.",
    "matched": (
        "Says what the direction alone does: at every step the weight change of an arm is scaled to the size that the "
        "baseline's tuned run of the same seed had. A difference here is none of effective rate."
    ),
}


@dataclass(frozen=True)
class Written:
    """The report's two files and its first sentence."""

    html: Path
    markdown: Path
    headline: str


def write_reports(folder: str | Path) -> Written:
    """Write report.html and report.md beside the results in `folder`. Errors: GradreelError where there are none."""
    from toolkit.frame import read_frame

    root = Path(folder)
    try:
        provenance = json.loads((root / "provenance.json").read_text(encoding="utf-8"))
        about = provenance["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        raise GradreelError(
            f"{str(root)!r} holds no results of an experiment; give the folder that `run` filled"
        ) from None
    if about != "ablation":
        raise GradreelError(f"{str(root)!r} holds results of kind {about!r}, not of an experiment")
    frame = read_frame(root / "frame.parquet")
    page, text = root / "report.html", root / "report.md"
    from ablations.runner._store import write_aside
    from ablations.study._agreement import REPLAY_FILE

    try:
        replayed = read_frame(root / REPLAY_FILE) if (root / REPLAY_FILE).is_file() else None
        write_aside(text, as_markdown(frame, provenance, replayed))
        write_aside(page, as_html(frame, provenance, replayed))
    except OSError as error:
        raise GradreelError(f"cannot write the report into {str(root)!r}: {error.strerror or error}") from None
    return Written(page, text, headline(provenance))


def is_results(folder: Path) -> bool:
    """Whether `folder` looks like what `run` fills."""
    return (folder / "provenance.json").is_file() and (folder / "frame.parquet").is_file()


def headline(provenance: Mapping[str, Any]) -> str:
    """The verdict at tuned rates in a sentence (at the shared rate where nothing was tuned)."""
    found = provenance["verdicts"]
    way = next((way for way in ("tuned", "shared", "matched") if any(v["way"] == way for v in found)), None)
    if way is None:
        return "Nothing is decided: no run of the baseline ended."
    parts = []
    for word in ("better", "worse", "not decided"):
        names = [_name(v) for v in found if v["way"] == way and v["verdict"] == word]
        if names:
            parts.append(f"{word}: {', '.join(names)}")
    where = {
        "tuned": "each at its own best lr",
        "shared": "all at one lr",
        "matched": "with equal sizes of weight change",
    }[way]
    seeds = " to ".join(str(count) for count in sorted({len(v["seeds"]) for v in found}))
    return f"Against {provenance['baseline']}, {where}, {seeds or 0} seeds: {'; '.join(parts)}."


def as_markdown(frame: pl.DataFrame, provenance: Mapping[str, Any], replayed: pl.DataFrame | None = None) -> str:
    """The report as Markdown, without figures; `replayed` is what `gradreel study` found for these results."""
    lines = [f"# {provenance['preset']}", "", provenance["question"], "", f"**{headline(provenance)}**", ""]
    lines += [f"Rule: {provenance['decides']}", ""]
    for title, says, header, rows in [*tables(provenance), *_replay_tables(replayed)]:
        lines += [f"## {title}", "", says, "", "| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    notes = provenance.get("notes") or []
    if notes:
        lines += ["## Notes", "", *(f"- {note}" for note in notes), ""]
    lines += ["## Provenance", "", *(f"- {name}: {value}" for name, value in facts(provenance)), ""]
    return "\n".join(lines)


def as_html(frame: pl.DataFrame, provenance: Mapping[str, Any], replayed: pl.DataFrame | None = None) -> str:
    """The report as one page that needs nothing else."""
    import jinja2

    from toolkit.report._write import draw_all

    drawn, missing = draw_all(frame, about="training")
    drawn.sort(key=lambda figure: _FIGURES.index(figure["name"]) if figure["name"] in _FIGURES else len(_FIGURES))
    if replayed is not None:
        more, lacking = draw_all(replayed, about="agreement")
        drawn, missing = [*drawn, *more], [*missing, *lacking]
    import toolkit.report

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([Path(__file__).parent, Path(toolkit.report.__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        title=f"{provenance['preset']}, size {provenance.get('size_name', 'cpu')}",
        question=provenance["question"],
        decides=provenance["decides"],
        headline=headline(provenance),
        tables=[*tables(provenance), *_replay_tables(replayed)],
        figures=drawn,
        missing=missing,
        notes=list(provenance.get("notes") or []),
        facts=facts(provenance),
    )


Table = tuple[str, str, Sequence[str], list[Sequence[str]]]


def tables(provenance: Mapping[str, Any]) -> list[Table]:
    """One table per way of comparing, then the lr grid: (title, what it says, header, rows)."""
    found: list[Table] = []
    header = ("arm", "lr", "difference [nats]", "95% interval", "bootstrap", "effect", "p (Holm)", "noise", "verdict")
    for way in ("shared", "tuned", "matched"):
        rows = [_row(v) for v in provenance["verdicts"] if v["way"] == way]
        if rows:
            says = f"{_SAYS[way]} Baseline {provenance['baseline']}{_baseline_rates(provenance, way)}."
            found.append((WAY_TITLES[way], says, header, rows))
    tuning = provenance.get("tuning") or {}
    if tuning:
        rows = [
            (arm, ", ".join(f"{lr}: {_loss(v)}" for lr, v in t["losses"].items()), _best(t))
            for arm, t in tuning.items()
        ]
        says = "Final validation loss on the tuning seeds, by the experts' peak lr."
        found.append(("The lr grid", says, ("arm", "losses [nats]", "best lr"), rows))
    return found


def _replay_tables(replayed: pl.DataFrame | None) -> list[Table]:
    """Replay against closed loop, where the baseline's reel was replayed."""
    if replayed is None:
        return []
    from ablations.study._agreement import agreement_tables

    return agreement_tables(replayed)


def facts(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a reader must know to judge and repeat the result, as (name, value)."""
    size = provenance["size"]
    made = provenance.get("made_by") or [{}]
    machine, versions = made[0].get("machine", {}), made[0].get("versions", {})
    data = (provenance.get("data") or [{}])[0]
    return [
        ("threshold", f"{provenance['threshold']:g} nats"),
        (
            "runs",
            f"{provenance['runs']}, of which {len(provenance['failed'])} more failed"
            if provenance["failed"]
            else str(provenance["runs"]),
        ),
        ("steps", f"{size['steps']} of {size['accumulation']} x {size['batch']} x {size['length']} tokens"),
        *([("settings, by what they change", _settings(size))] if _settings(size) else []),
        ("seeds", ", ".join(map(str, size["seeds"])) + f"; lr chosen on {', '.join(map(str, size['tuning_seeds']))}"),
        ("model", ", ".join(f"{k} {v}" for k, v in size["model"].items() if not isinstance(v, (dict, list)))),
        ("data", ", ".join(f"{k} {v}" for k, v in data.items())),
        ("machine", ", ".join(f"{k} {v}" for k, v in machine.items())),
        ("versions", ", ".join(f"{k} {v}" for k, v in versions.items())),
        ("commit", ", ".join(sorted({str(m.get("commit")) for m in made}))),
        ("training time", f"{provenance['run_seconds'] / 60:.0f} minutes over all runs, one thread each"),
    ]


def _baseline_rates(provenance: Mapping[str, Any], way: str) -> str:
    """`` at lr ...``, by setting where settings differ in it."""
    rates = {v["setting"]: v["baseline_lr"] for v in provenance["verdicts"] if v["way"] == way and v["baseline_lr"]}
    if not rates:
        return ""
    if len(set(rates.values())) == 1:
        return f" at lr {next(iter(rates.values())):g}"
    return " at lr " + ", ".join(f"{rate:g} ({setting})" for setting, rate in rates.items())


def _settings(size: Mapping[str, Any]) -> str:
    """What each setting changes, in words."""
    told = (
        f"{name}: {', '.join(f'{k} {v}' for k, v in changes.items())}" for name, changes in size["settings"].items()
    )
    return "; ".join(text for text in told if not text.startswith(": "))


def _row(v: Mapping[str, Any]) -> Sequence[str]:
    return (
        _name(v),
        "-" if v["lr"] is None else f"{v['lr']:g}",
        _signed(v["mean"]),
        _interval(v["low"], v["high"]),
        _interval(v["boot_low"], v["boot_high"]),
        "-" if v["effect"] is None else f"{v['effect']:+.1f}",
        "-" if v["p_holm"] is None else f"{v['p_holm']:.2g}",
        "-" if v["noise"] is None else f"{v['noise']:.4f}",
        f"{v['verdict']} ({v['reason']})",
    )


def _name(v: Mapping[str, Any]) -> str:
    return f"{v['setting']}/{v['arm']}" if v["setting"] else str(v["arm"])


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"


def _interval(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"


def _loss(value: float | None) -> str:
    return "diverged" if value is None or value == float("inf") else f"{value:.4f}"


def _best(tuning: Mapping[str, Any]) -> str:
    if tuning["best"] is None:
        return "none"
    return f"{tuning['best']:g}" + (" (edge of the grid)" if tuning["edge"] else "")
