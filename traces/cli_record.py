"""The verb `record` for a user's own training script, and its options as a `RecordAt`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traces.bootstrap import record_script
from traces.cli import one_line_errors
from traces.console import example
from traces.errors import GradreelError

if TYPE_CHECKING:
    from traces.record_at import RecordAt

__all__ = ["record", "record_at", "record_script", "register"]


def register(app: typer.Typer) -> None:
    """Add the verb to a command-line application."""
    app.command("record", epilog=example("gradreel record run.trace -- python train.py --steps 100"))(
        one_line_errors(record)
    )


def record(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new trace folder.", show_default=False)],
    command: Annotated[
        list[str], typer.Argument(metavar="-- python SCRIPT [ARGS]", help="The training script.", show_default=False)
    ],
    every: Annotated[int, typer.Option(min=1, help="Record each n-th step.")] = 1,
    bursts: Annotated[str | None, typer.Option(metavar="LENGTH/PERIOD", help="Record bursts, such as 16/500.")] = None,
    roles: Annotated[str, typer.Option(help="Roles to record, separated by commas.")] = "router,routed_expert",
    streams: Annotated[str, typer.Option(help="Streams, separated by commas.")] = "gradient,routing,scalars",
    experts: Annotated[str, typer.Option(help="'all', or how many experts to sample per layer.")] = "all",
    dtype: Annotated[str | None, typer.Option(help="Of recorded gradients, such as bfloat16.")] = None,
    budget: Annotated[str, typer.Option(help="Where recording ends; training goes on.")] = "10GiB",
) -> None:
    """Run your own training script and record it, without a change to the script."""
    at = record_at(
        every=every, bursts=bursts, roles=roles, streams=streams, experts=experts, dtype=dtype, budget=budget
    )
    raise typer.Exit(record_script(out, command, at))


def record_at(
    *,
    every: int = 1,
    bursts: str | None = None,
    roles: str = "router,routed_expert",
    streams: str = "gradient,routing,scalars",
    experts: str = "all",
    dtype: str | None = None,
    budget: str = "10GiB",
) -> RecordAt:
    """Build the policy from option texts; `GradreelError` says which one is wrong."""
    from traces.record_at import RecordAt

    return RecordAt(
        every=every,
        bursts=None if bursts is None else _pair(bursts),
        roles=_names(roles),
        streams=_names(streams),
        experts=int(experts) if experts.isdecimal() else experts,
        dtype=dtype,
        budget=budget,
    )


def _pair(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise GradreelError(f"--bursts {text!r} must be LENGTH/PERIOD, such as 16/500")
    return int(parts[0]), int(parts[1])


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
