"""The verbs that make files of a trace, or a trace of files: import, export, slice, diff. None imports torch.

Errors come out as they are; `traces.console.run` makes one line and an exit code of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from traces.cli import TracePath
from traces.console import CheckFailed, example, out, progress_bar

OutPath = Annotated[str, typer.Argument(metavar="OUT", help="What is written; it must be new.", show_default=False)]
Steps = Annotated[str, typer.Option("--steps", metavar="FIRST:LAST", help="Only these steps, both ends included.")]
Params = Annotated[str, typer.Option("--params", metavar="PATTERN", help="Only parameters such as '*experts*'.")]


def register(app: typer.Typer) -> None:
    """Add these verbs to a command-line application."""
    app.command("import", epilog=example("gradreel import router_traces/ run.trace --num-experts 64"))(import_)
    app.command(epilog=example("gradreel export run.trace gradients/ --to safetensors --steps 10:20"))(export)
    app.command("slice", epilog=example("gradreel slice run.trace small.trace --steps 100:115 --experts 0-7"))(slice_)
    app.command(epilog=example("gradreel diff first.trace second.trace"))(diff)


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="LOG", help="A folder or file of Megatron-LM's RouterTracer, or a CSV.", show_default=False
        ),
    ],
    target: OutPath,
    kind: Annotated[
        str | None, typer.Option("--from", metavar="KIND", help="megatron or csv; default: by the name.")
    ] = None,
    num_experts: Annotated[
        int | None, typer.Option(help="Experts of each layer; default: the largest id in the log, and 1.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Of a CSV without a column token: activations per token.")] = None,
) -> None:
    """Make a trace of a routing-only log of another tool, for the measures of load and routing."""
    from traces import open_trace
    from traces.interchange import import_routing

    with progress_bar("import", None) as advance:
        place = import_routing(source, target, kind=kind, num_experts=num_experts, top_k=top_k, progress=advance)
    trace = open_trace(place, check_hash=False)
    layers = {(x.num_experts, x.top_k) for x in trace.layers}
    shape = ", ".join(f"{e} experts, top-{k}" for e, k in sorted(layers)[:4])
    console = out()
    console.print(f"{place}: {len(trace.steps)} steps, {len(trace.layers)} MoE layers ({shape})", markup=False)
    console.print(f"Try: gradreel replay {place} --metric max_vio", markup=False, soft_wrap=True)


def export(
    trace: TracePath,
    target: OutPath,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Of a trace: csv, megatron (routing), safetensors. Of a frame: csv, parquet, tensorboard, wandb. "
            "Default: csv for NAME.csv.",
        ),
    ] = None,
    stream: Annotated[
        str, typer.Option(help="For safetensors: gradient, weight, grad_buffer, state.SLOT.")
    ] = "gradient",
    steps: Steps = ":",
    params: Params = "*",
) -> None:
    """Write a trace's routing or tensors, or the frame of a replay or run, as files of other tools."""
    from traces import open_trace
    from traces.errors import GradreelError, unknown
    from traces.interchange import export_routing, export_tensors
    from traces.slicing import between, steps_between

    kind = to or ("csv" if target.lower().endswith(".csv") else None)
    for is_mine, write in EXPORTS:
        if is_mine(trace):
            if (stream, steps, params) != ("gradient", ":", "*"):
                raise GradreelError("--stream, --steps and --params choose from a trace; this is a frame")
            write(trace, target, kind)
            return
    opened, ends = open_trace(trace), steps_between(steps)
    if kind is None:
        raise GradreelError("say what to write: --to csv, --to megatron or --to safetensors")
    if kind not in ("csv", "megatron", "safetensors"):
        raise unknown("kind of file", kind, ("csv", "megatron", "safetensors"))
    if kind == "safetensors":
        chosen = between(opened.weight_steps() if stream == "weight" else opened.steps, ends)
        with progress_bar("export", len(chosen)) as advance:
            files = export_tensors(opened, target, stream=stream, steps=chosen, params=params, progress=advance)
        done = f"{files[0]} to {files[-1].name}" if len(files) > 1 else str(files[0])
        out().print(f"{len(files)} files: {done}", markup=False, soft_wrap=True)
        return
    if params != "*" or stream != "gradient":
        raise GradreelError(f"--params and --stream choose tensors; routing, as for {kind}, belongs to no parameter")
    chosen = between(opened.steps, ends)
    with progress_bar("export", len(chosen)) as advance:
        place = export_routing(opened, target, kind=kind, steps=chosen, progress=advance)
    out().print(f"{place}: routing of {len(chosen)} steps", markup=False, soft_wrap=True)


#: Exports of floors above: whether a source is theirs, and what writes it to a target as a kind of file.
EXPORTS: list[tuple[Callable[[Path], bool], Callable[[Path, str, str | None], None]]] = []


def slice_(
    trace: TracePath,
    target: OutPath,
    steps: Steps = ":",
    params: Params = "*",
    experts: Annotated[str | None, typer.Option(metavar="IDS", help="Only these experts, such as 0,4,8-11.")] = None,
) -> None:
    """Cut some steps, parameters and experts out of a trace, as a smaller trace that says what it was cut from."""
    from traces import open_trace
    from traces.slicing import ids_of, slice_trace, steps_between

    ends, ids = steps_between(steps), None if experts is None else ids_of(experts)
    with progress_bar("slice", None) as advance:
        cut = slice_trace(open_trace(trace), target, steps=ends, params=params, experts=ids, progress=advance)
    out().print(str(cut), markup=False, soft_wrap=True)


def diff(
    first: TracePath,
    second: TracePath,
    steps: Steps = ":",
    params: Params = "*",
) -> None:
    """Name the first step and tensor in which two traces differ, bit by bit (exit code 1), or say that none does."""
    from traces import open_trace
    from traces.differences import first_difference
    from traces.slicing import steps_between

    one, other = open_trace(first), open_trace(second)
    with progress_bar("diff", len(one.all_steps)) as advance:
        found = first_difference(one, other, steps=steps_between(steps), params=params, progress=advance)
    if found is not None:
        raise CheckFailed(f"{one.path.name} and {other.path.name} differ first at {found}")
    out().print(f"{one.path.name} and {other.path.name} are equal, bit by bit", markup=False, soft_wrap=True)
