"""The verbs that need nothing but a trace: info, verify, recover. None of them imports torch.

Errors come out as they are; `traces.console.run` makes one line and an exit code of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traces.console import out

TracePath = Annotated[
    Path, typer.Argument(metavar="TRACE", help="The trace folder, such as demo.trace.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the verbs of this floor to a command-line application."""
    for verb in (info, verify, recover):
        app.command(verb.__name__)(verb)


def info(trace: TracePath) -> None:
    """Show what a trace holds: model, steps, streams, sizes, parameters by role, routing.

    Example: gradreel info demo.trace
    """
    from traces import open_trace
    from traces._info import print_info

    print_info(out(), open_trace(trace, check_hash=False))


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
