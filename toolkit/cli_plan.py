"""The verb that plans memory. Imported whenever the command starts, so nothing heavy is imported before it runs."""

from __future__ import annotations

import importlib
import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from traces.console import example, out, say
from traces.errors import GradreelError

#: Modules of floors above that register names of models when they are imported.
MODEL_MODULES: list[str] = []
DEFAULT_RECIPES = ("adamw", "skewadam", "mesh")


def register(app: typer.Typer) -> None:
    """Add the verb to a command-line application."""
    app.command(epilog=example("gradreel plan skewadam-6.78b -r skewadam -r adamw --gpu 40GB"))(plan)


def add_models(module: str) -> None:
    """Import `module` before a name is looked up; it registers models."""
    MODEL_MODULES.append(module)


def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A name (gradreel list models), a config.json, or a trace.", show_default=False
        ),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", "-r", metavar="NAME", help="A recipe such as mesh+sign_only; repeat for several."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Does it fit one GPU of this size, such as 40GB or 40GiB?")
    ] = None,
    gpus: Annotated[str | None, typer.Option(metavar="NxSIZE", help="Find a layout of N GPUs, such as 8x80GB.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a micro-step.")] = 1,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; default 2048, or what the model allows.")
    ] = None,
    micro_steps: Annotated[int, typer.Option(min=1, help="Micro-steps whose gradients are added up.")] = 1,
    weights: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Of weights, such as bfloat16; default: the model's.")
    ] = None,
    gradients: Annotated[str | None, typer.Option(metavar="DTYPE", help="Of gradients; default: the weights'.")] = None,
    accumulation: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Of a buffer of its own that gradients are added up in.")
    ] = None,
    master: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Of a second copy of the weights, which the optimizer steps.")
    ] = None,
    checkpointing: Annotated[str, typer.Option(help="none, selective or full.")] = "none",
    attention: Annotated[str, typer.Option(help="flash or eager.")] = "flash",
    offload: Annotated[bool, typer.Option("--offload", help="Optimizer state lives on the host.")] = False,
    data: Annotated[int, typer.Option(min=1, help="Replicas of all else.")] = 1,
    fsdp: Annotated[int, typer.Option(min=1, help="GPUs that share weights, gradients and state.")] = 1,
    expert: Annotated[int, typer.Option(min=1, help="GPUs of those that share a layer's experts.")] = 1,
    tensor: Annotated[int, typer.Option(min=1, help="GPUs that share each matrix.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Stages of layers.")] = 1,
    original: Annotated[
        bool, typer.Option("--original-step", help="Count the temporaries of the papers' own code, not of ours.")
    ] = False,
    track: Annotated[
        bool,
        typer.Option("--track", help="Also run two steps on tensors without memory, and say where their peak is."),
    ] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything as JSON too.")] = None,
    out_file: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write a Frame (parquet) too.")] = None,
) -> None:
    """Say what training a model with each recipe needs, byte by byte, without allocating it, and whether it fits."""
    from toolkit.memory import Parallel, Precision, Run, architecture
    from toolkit.memory._answers import Fit, find_layout, fit
    from toolkit.memory._plan import Planner, usual_sequence
    from toolkit.memory._show import plain, print_plan, print_reported, print_side_by_side
    from toolkit.memory._units import both, parse_bytes, parse_gpus
    from toolkit.variants import recipe as find_recipe

    if gpu is not None and gpus is not None:
        raise GradreelError("--gpu asks about one GPU and --gpus about a layout of several; give one of the two")
    parallel = Parallel(data=data, fsdp=fsdp, expert=expert, tensor=tensor, pipeline=pipeline)
    if gpus is not None and parallel.world > 1:
        raise GradreelError(
            f"--gpus looks for the degrees itself, but {parallel.describe()} is given; leave one of the two out"
        )
    if track and (parallel.world > 1 or gpus is not None or offload or checkpointing == "selective"):
        raise GradreelError(
            "--track follows one process, without --offload and with --checkpointing none or full; leave it out, or "
            "plan one GPU"
        )
    precision = Precision(weights=weights, gradients=gradients, accumulation=accumulation, master=master)
    recipes = [find_recipe(name) for name in recipe or DEFAULT_RECIPES]
    budget = parse_bytes(gpu) if gpu is not None else None
    cluster = parse_gpus(gpus) if gpus is not None else None
    given = _source(source)
    arch = architecture(given)
    planner = Planner(arch)
    run = Run(
        batch=batch,
        sequence=sequence or usual_sequence(arch),
        micro_steps=micro_steps,
        checkpointing=checkpointing,
        attention=attention,
        offload=offload,
        step="original" if original else "ours",
    )
    console, plans, answers, lines = out(), [], [], []
    for each in recipes:
        if cluster is not None:
            found, fits = find_layout(planner, each, *cluster, precision=precision, run=run)
            plans.append(found)
            room = cluster[1] - found.peak_bytes
            words = f"{each.name}: {cluster[0]} GPUs of {both(cluster[1])}: "
            verdict = f"{both(room)} to spare" if fits else f"nothing fits; the smallest layout lacks {both(-room)}"
            lines.append(f"{words}{found.parallel.describe()}: {verdict}.")
            answers.append({"recipe": each.name, "fits": fits, "gpus": cluster[0], "budget_bytes": cluster[1]})
            continue
        plans.append(planner.plan(each, precision=precision, parallel=parallel, run=run))
        if budget is not None:
            answer: Fit = fit(planner, each, budget, precision=precision, parallel=parallel, run=run)
            lines += answer.lines()
            answers.append(answer.to_dict())
    if len(plans) <= 3:
        for made in plans:
            print_plan(console, made)
    if len(plans) > 1:
        print_side_by_side(console, plans)
    print_reported(console, [made.recipe for made in plans])
    for line in lines:
        console.print(line, markup=False)
    if lines:
        console.print("The CUDA context, its libraries and fragmentation come on top.", markup=False)
    for each in recipes if track else ():
        first, *rest = _track(given, each, run)
        for line in (f"{each.name}: {first}", *rest):
            console.print(line, markup=False)
    if json is not None:
        _write_json(json, plain(plans, answers))
    if out_file is not None:
        import polars as pl

        from toolkit.frame import write_frame

        write_frame(out_file, pl.concat([made.frame for made in plans]))
        say(f"Frame: {out_file}")


def _source(text: str) -> Any:
    for module in MODEL_MODULES:
        importlib.import_module(module)
    if (Path(text) / "header.json").is_file():
        from traces.reader import open_trace

        return open_trace(text)
    return text


def _track(source: Any, recipe: Any, run: Any) -> list[str]:
    from toolkit.memory._tracked import tracked_peak

    return tracked_peak(
        source,
        recipe,
        step=run.step,
        batch=run.batch,
        sequence=run.sequence,
        micro_steps=run.micro_steps,
        checkpointing=run.checkpointing,
    ).lines()


def _write_json(file: Path, values: dict[str, Any]) -> None:
    from toolkit.frame import check_target

    check_target(file, "a plan", (b"{",))
    file.write_text(json_module.dumps(values, indent=2) + "\n", encoding="utf-8")
    say(f"JSON: {file}")
