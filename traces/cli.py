"""The verbs that need nothing but a trace: info, verify, recover. None of them imports torch.

Errors come out as they are; `traces.console.run` makes one line and an exit code of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traces._store import as_place
from traces.console import out, say

TracePath = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="The trace: a folder such as demo.trace, or a URL such as s3://bucket/demo.trace.",
        show_default=False,
        parser=as_place,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verbs of this floor to a command-line application."""
    for verb in (info, verify, recover):
        app.command(verb.__name__)(verb)


def info(
    trace: TracePath,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show steps as they are sealed, until the trace ends or Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="With --follow: how often to look.")] = 2.0,
) -> None:
    """Show what a trace holds: model, steps, streams, sizes, parameters by role, routing.

    Example: gradreel info demo.trace
    """
    if follow:
        _follow(trace, every)
        return
    from traces import open_trace
    from traces._info import print_info

    print_info(out(), open_trace(trace, check_hash=False))


def _follow(trace: Path, every: float) -> None:
    from traces.follow import follow

    console = out()
    try:
        follow(
            trace,
            lambda line: console.print(line, markup=False, soft_wrap=True, highlight=False),
            every=every,
            note=say,
        )
    except KeyboardInterrupt:  # the way to end it, so nothing went wrong
        console.print()


def verify(trace: TracePath) -> None:
    """Read every byte of a trace and name each file and step that is damaged (exit code 1 if any is).

    Example: gradreel verify demo.trace
    """
    from traces._info import progress_over
    from traces.verify import verify_trace

    console = out()
    with progress_over(trace) as advance:
        findings = verify_trace(trace, progress=advance)
    for finding in findings:
        console.print(f"[{'red' if finding.severity == 'damage' else 'yellow'}]{finding.severity}[/]", end=" ")
        console.print(str(finding), markup=False, soft_wrap=True)
    damage = sum(finding.severity == "damage" for finding in findings)
    if damage:
        console.print(f"{damage} damaged place{'s' * (damage > 1)} in {trace.name}", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    console.print(f"{trace.name} is sound: every byte agrees with its seal", markup=False, soft_wrap=True)


def recover(trace: TracePath) -> None:
    """End a trace whose writer was killed: keep its sealed steps, set the rest aside, delete nothing.

    Example: gradreel recover demo.trace
    """
    from traces.recover import recover as recover_trace

    console = out()
    result = recover_trace(trace)
    console.print(str(result), markup=False, soft_wrap=True)
    damage = [finding for finding in result.findings if finding.severity == "damage"]
    for finding in damage:
        console.print("[red]damage[/]", end=" ")
        console.print(str(finding), markup=False, soft_wrap=True)
    if damage:
        raise typer.Exit(1)
