"""The report's tables, as rows of ready texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from toolkit.plots._theme import INK, RECORDED, family_colour, recipe_order
from toolkit.plots.memory_bars import memory_table, readable_bytes
from toolkit.report._measures import few_token_amplification, number, percent, significant, unit_values
from toolkit.report._verdict import Comparison

ABSENT = "\N{EN DASH}"
#: Longest value of a provenance row; what is longer is cut and said to be cut.
_LONGEST = 2000
_MOST_ROWS = 300


@dataclass(frozen=True)
class Cell:
    """One entry: its text, and in smaller print its spread over experts and parameters."""

    text: str
    spread: str = ""


@dataclass(frozen=True)
class Table:
    """`columns` are (title, unit) of all columns after the first; each row is (recipe, colour, cells), the recipe
    in pieces between which a line may break."""

    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[tuple[str, ...], str, tuple[Cell, ...]], ...]
    absent: tuple[str, ...] = ()


def recipe_table(frame: pl.DataFrame) -> Table:
    """Per recipe: the update measures on routed experts, and the bytes over all parameters.

    Numbers are medians over experts and parameters with the 10th to 90th percentile. `absent` names the metrics
    without any defined value.
    """
    amplification, few = unit_values(frame, "amplification"), few_token_amplification(frame)
    wanted: list[tuple[str, str, str, pl.DataFrame, Callable[[float], str]]] = [
        ("update RMS", "per element", "update_rms", unit_values(frame, "update_rms"), significant),
        ("update cosine", "lag 1", "update_cos", unit_values(frame, "update_cos", 1), number),
        ("sign flips", "lag 1", "update_sign_flip_rate", unit_values(frame, "update_sign_flip_rate", 1), percent),
        ("amplification", "update / gradient", "amplification", amplification, significant),
        (
            "few tokens",
            "× many tokens",
            "amplification",
            few,
            lambda v: f"{significant(v)}×",
        ),
        ("zombie", "displacement", "zombie_displacement", unit_values(frame, "zombie_displacement"), significant),
    ]
    memory = {name: amounts for name, *amounts in memory_table(frame).iter_rows()}
    present = {name for *_, values, _ in wanted for name in values["recipe"].to_list()} | set(memory)
    # Rows that no recipe produced appear only where nothing else does.
    names = [name for name in recipe_order(present) if name != RECORDED] or recipe_order(present)
    rows = []
    for name in names:
        cells = [_spread_cell(values.filter(pl.col("recipe") == name)["value"], show) for *_, values, show in wanted]
        cells += [Cell(ABSENT if v is None else readable_bytes(v)) for v in memory.get(name, [None, None])]
        colour = family_colour(name)
        parts = tuple(re.split(r"(?<=[+(,])", name))
        rows.append((parts, "var(--ink)" if colour == INK else colour, tuple(cells)))
    titles = [(title, unit) for title, unit, *_ in wanted] + [
        ("state", "kept bytes"),
        ("pinned gradient", "kept bytes"),
    ]
    absent = [metric for _, _, metric, values, _ in wanted if values.is_empty() and values is not few]
    if few.is_empty():
        absent.append("amplification per expert")
    for position, metric in enumerate(("state_bytes", "pinned_gradient_bytes")):
        if all(amounts[position] is None for amounts in memory.values()):
            absent.append(metric)
    return Table(tuple(titles), tuple(rows), tuple(dict.fromkeys(absent)))


def by_pair(comparisons: tuple[Comparison, ...]) -> list[tuple[str, str, list[Comparison]]]:
    """The comparisons gathered by their two recipes, in order: (left, right, comparisons)."""
    pairs: dict[tuple[str, str], list[Comparison]] = {}
    for c in comparisons:
        pairs.setdefault((c.left, c.right), []).append(c)
    return [(left, right, found) for (left, right), found in pairs.items()]


@dataclass(frozen=True)
class Facts:
    """One block of the provenance: `rows` of (name, value) under a `heading`, "" for what stands at the top."""

    heading: str
    rows: tuple[tuple[str, str], ...]

    @property
    def long(self) -> bool:
        """Whether the block is folded away at first."""
        return len(self.rows) > 20


def provenance_blocks(provenance: Mapping[str, Any]) -> list[Facts]:
    """Single values first, then one block per nested mapping, its names dotted, in the order given.

    Empty values are left out; values and blocks that are too long are cut and say so.
    """

    def flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from flat(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value is not None and value != "" and value != [] and value != ():
            yield prefix, _plain(value)

    top: list[tuple[str, str]] = []
    blocks: list[Facts] = []
    for key, value in provenance.items():
        if not isinstance(value, Mapping):
            top.extend(flat(str(key), value))
        elif rows := list(flat("", value)):
            if len(rows) > _MOST_ROWS:
                rows = [*rows[:_MOST_ROWS], ("…", f"{len(rows) - _MOST_ROWS} more entries, left out of this page")]
            blocks.append(Facts(str(key), tuple(rows)))
    if len(top) > _MOST_ROWS:
        top = [*top[:_MOST_ROWS], ("…", f"{len(top) - _MOST_ROWS} more entries, left out of this page")]
    return ([Facts("", tuple(top))] if top else []) + blocks


def trace_id(provenance: Mapping[str, Any], frame: pl.DataFrame) -> str:
    """The trace's id from the provenance, else the runs named in the frame."""
    trace = provenance.get("trace")
    candidates = [provenance.get("trace_id")]
    candidates.append(trace.get("id") if isinstance(trace, Mapping) else trace)
    for found in candidates:
        if found:
            return str(found)
    runs = frame["run"].drop_nulls().unique().sort().to_list()
    if len(runs) > 3:
        return f"{', '.join(runs[:3])} and {len(runs) - 3} more"
    return ", ".join(runs) or "unnamed"


def _spread_cell(values: pl.Series, show: Callable[[float], str]) -> Cell:
    middle = values.median()
    if not isinstance(middle, float):
        return Cell(ABSENT)
    low, high = values.quantile(0.1, "linear"), values.quantile(0.9, "linear")
    if low is None or high is None or values.len() < 3 or show(low) == show(high):
        return Cell(show(middle))
    return Cell(show(middle), f"{show(low)} to {show(high)}")


def _plain(value: Any) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        text = ", ".join(value)
    elif isinstance(value, list | tuple | dict):
        text = json.dumps(value, ensure_ascii=False, default=str)
    else:
        text = str(value)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}… ({len(text) - _LONGEST} more characters)"
    return text
