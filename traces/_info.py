"""What `gradreel info` prints, at 80 columns, and the progress bar of `verify`."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from traces._json import clip
from traces._store import StorePath, total_bytes
from traces.errors import GradreelError
from traces.reader import Trace
from traces.record_at import RecordAt, format_bytes
from traces.schema import DTYPES

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN_BURSTS = 4


def print_info(console: Console, trace: Trace) -> None:
    """Print the summary of an open trace. Reads headers and seals, never a tensor."""
    sizes = _stream_sizes(trace)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(trace, sum(size for size, _ in sizes.values())):
        facts.add_row(name, _plain(value))
    console.print(facts)
    if sizes:
        console.print(
            _table("stream", ("steps", "bytes"), [(k, str(n), format_bytes(b)) for k, (b, n) in sizes.items()])
        )
    console.print(_table("role", ("parameters", "elements", "bytes"), _roles(trace)))
    if trace.layers:
        console.print(_table("MoE layer", ("experts", "top-k", "tokens"), _layers(trace)))


def _facts(trace: Trace, tensor_bytes: int) -> list[tuple[str, str]]:
    run = trace.header.run
    state = "finished" if trace.finished else "being written" if trace.being_written else "unfinished"
    if state == "unfinished" and not isinstance(trace.path, StorePath):
        state += f", run: gradreel recover {trace.path}"
    bursts = trace.bursts()
    shown = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in bursts[:_SHOWN_BURSTS])
    if len(bursts) > _SHOWN_BURSTS:
        shown += f", ... to {bursts[-1][1]}"
    facts = [
        ("trace", f"{trace.path} ({trace.id}, format {trace.header.format_version}, {state})"),
        ("model", clip_text(run.get("model", "not stated"))),
        ("optimizer", clip_text(run.get("optimizer", run.get("optimizer_class", "not stated")))),
        ("recorded steps", f"{len(trace.steps)} of {_seen(trace)} seen{': ' + shown if shown else ''}"),
        ("bursts", "one unbroken run" if len(bursts) == 1 else f"{len(bursts)} runs of consecutive steps"),
        ("policy", _policy(trace.header.record)),
        ("size", f"{format_bytes(total_bytes(trace.path))}, tensors {format_bytes(tensor_bytes)}"),
    ]
    if trace.header.ranks > 1:
        facts.append(("ranks", _ranks(trace)))
    if trace.lost_steps:
        facts.append(("lost steps", f"{trace.lost_steps} could not be written"))
    return facts


def _ranks(trace: Trace) -> str:
    """How many ranks there are, which are not there, and which ones ended early."""
    text = str(trace.header.ranks) + (f", {trace.missing_ranks} not there" if trace.missing_ranks else "")
    ends = {one.rank: one.steps[-1] if one.steps else 0 for one in trace._ranks}
    if early := [rank for rank, last in ends.items() if last < max(ends.values())]:
        shown = ", ".join(f"rank {rank} at step {ends[rank]}" for rank in early[:_SHOWN_BURSTS])
        text += (
            f"; {shown}{', ...' if len(early) > _SHOWN_BURSTS else ''} ended before the others ({max(ends.values())})"
        )
    return text


def _seen(trace: Trace) -> int:
    """How many optimizer steps the trace knows of; the closing snapshot of the weights is none."""
    steps = trace.all_steps
    closing = {*trace.weight_steps(), *trace.probe_steps()}
    if not steps or steps[-1] not in closing:
        return len(steps)
    last = trace._record(steps[-1])
    return len(steps) - (not last.recorded and not last.skipped and "lr" not in last.scalars)


def clip_text(value: Any, width: int = 200) -> str:
    """A metadata value as one printable line."""
    text = value if isinstance(value, str) else clip(value, width)
    return "".join(c if c.isprintable() else "?" for c in text)[:width]


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "?" for c in text))


def _policy(record: dict[str, Any]) -> str:
    try:
        at = RecordAt.from_json(record)
    except (GradreelError, TypeError):
        return "not stated"
    when = (
        f"{at.bursts[0]} steps of each {at.bursts[1]}"
        if at.bursts
        else f"each {at.every}th step"
        if at.every > 1
        else "each step"
    )
    experts = "all experts" if at.experts == "all" else f"experts {clip(at.experts)}"
    return f"{when}; {', '.join(at.roles)}; {experts}; budget {at.budget or 'none'}"


def _stream_sizes(trace: Trace) -> dict[str, tuple[int, int]]:
    """Bytes and number of steps of each stream."""
    sizes: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    for rank in trace._ranks:
        for seal in rank.seals:
            for entry in seal.files:
                kind = entry.name.split("-")[0]
                if kind == "routing":
                    sizes[kind] += entry.bytes
                    steps[kind] += sum(bool(rank.step(s).routing) for s in seal.steps)
                    continue
                chunk = rank.chunk(seal, kind)
                index = chunk.index() if chunk is not None else {}
                for (_, stream, _), slot in index.items():
                    sizes[stream] += slot.size
                steps.update(stream for _, stream in {(key[0], key[1]) for key in index})
    return {name: (sizes[name], steps[name]) for name in sorted(sizes)}


def _roles(trace: Trace) -> list[tuple[str, ...]]:
    count: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for param in trace.header.params:
        count[param.role] += 1
        elements[param.role] += param.numel
        size[param.role] += param.numel * DTYPES[param.dtype][1].itemsize
    return [(role, str(count[role]), f"{elements[role]:,}", format_bytes(size[role])) for role in count]


def _layers(trace: Trace) -> list[tuple[str, ...]]:
    tokens: Counter[int] = Counter()
    for rank in trace._ranks:
        for step in rank.steps:
            for layer, _, count in rank.step(step).routing:
                tokens[layer] += count
    return [(str(x.layer), str(x.num_experts), str(x.top_k), f"{tokens[x.layer]:,}") for x in trace.layers]


def _table(first: str, others: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold", min_width=14)
    for name in others:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


@contextlib.contextmanager
def progress_over(path: Path) -> Iterator[Callable[[int], None] | None]:
    """A bar over the bytes of a trace on stderr; nothing where stderr is no terminal or the path is no folder."""
    if not sys.stderr.isatty() or not path.is_dir():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("verify"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("verify", total=total_bytes(path))
        yield lambda size: progress.advance(task, size)
