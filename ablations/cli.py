"""The `gradreel` command: the verbs of this floor, and those of the floors below.

Nothing here may import torch or a plotting library before a verb needs it, nor `traces` before `main` has made sure
that it is ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

_ROOT = Path(__file__).resolve().parent.parent
_SHARED_NAMES = ("traces", "toolkit")  # packages of ours that distributions on the index are called as well


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command; exits with 0 (good), 1 (a check found a difference) or 2 (wrong usage)."""
    for package in _SHARED_NAMES:
        place = _place_of(package)
        if place != _ROOT / package:
            where = "is missing" if place is None else f"comes from {str(place)!r}, not from {str(_ROOT / package)!r}"
            print(
                f"error: package {package!r} {where}; uninstall what put it there, reinstall gradreel", file=sys.stderr
            )
            sys.exit(2)
    from traces.console import run

    sys.exit(run(build_app(), plugins_first(sys.argv[1:] if arguments is None else arguments)))


def build_app() -> typer.Typer:
    """The whole command line. Registers verbs only; their work is imported when they run."""
    from ablations import cli_measure, cli_run, cli_simulate, cli_study
    from toolkit import cli as toolkit_cli
    from toolkit import cli_new, cli_plan, cli_view
    from traces import cli as traces_cli
    from traces import cli_files
    from traces.console import example, new_app

    app = new_app("Record a mixture-of-experts training run and replay it through optimizers.")
    app.callback()(options)
    app.command(epilog=example("gradreel demo"))(demo)
    app.command(epilog=example("gradreel record run.trace -- python train.py --steps 100"))(record)
    cli_run.register(app)
    cli_simulate.register(app)
    cli_study.register(app)
    cli_measure.register(app)
    traces_cli.register(app)
    cli_files.register(app)
    cli_new.register(app)
    toolkit_cli.register(app)
    cli_plan.register(app)
    cli_view.register(app)
    cli_plan.add_models("ablations.models.known")
    toolkit_cli.add_kind("presets", "ablations.presets", "PRESETS")
    toolkit_cli.add_kind("models", "ablations.models.known", "KNOWN")
    toolkit_cli.add_kind("simulations", "ablations.simulate.presets", "SIMULATIONS")
    toolkit_cli.add_report(cli_run.is_results, cli_run.report)
    toolkit_cli.add_bench("recorder", _bench_recorder)
    toolkit_cli.add_bench("simulate", cli_simulate.bench)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        for line in version_lines():
            print(line)
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    plugin: Annotated[
        list[Path] | None, typer.Option(metavar="FILE.py", help="Load a plug-in file of yours; may be repeated.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error as well.")] = False,
) -> None:
    """What may stand before every verb; the version is printed, and `--debug` taken, before this is called."""
    if plugin:
        _load_plugins(plugin)


def demo(
    folder: Annotated[Path, typer.Argument(help="Where the trace, the frame and the report go.")] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(min=2, help="Train fewer or more steps than the preset's.")] = None,
) -> None:
    """Train a small model, record it live, replay it through eight optimizers, and write a report."""
    from ablations.demo import run_demo

    for line in run_demo(folder, steps=steps).closing_lines():
        print(line)


def record(
    path: Annotated[
        str, typer.Argument(metavar="OUT", help="The new trace: a folder, or a URL as s3://...", show_default=False)
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- python SCRIPT [ARGS]]", help="Your own training script.", show_default=False),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Train and record this preset instead of a script.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Of a preset: fewer or more steps than its own.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Record each n-th step.")] = 1,
    bursts: Annotated[str | None, typer.Option(metavar="LENGTH/PERIOD", help="Record bursts, such as 16/500.")] = None,
    roles: Annotated[str, typer.Option(help="Roles to record, separated by commas; or all.")] = "router,routed_expert",
    streams: Annotated[
        str, typer.Option(help="Streams, by commas; also weight, scores, logits, statistics, ...")
    ] = "gradient,routing,scalars",
    experts: Annotated[str, typer.Option(help="'all', or how many experts to sample per layer.")] = "all",
    dtype: Annotated[str | None, typer.Option(help="Of recorded gradients, such as bfloat16.")] = None,
    budget: Annotated[str, typer.Option(help="Where recording ends; training goes on.")] = "10GiB",
) -> None:
    """Record a training run: your own script, unchanged, or one of the presets."""
    from traces._store import as_place
    from traces.cli_record import record_at, record_script
    from traces.errors import GradreelError

    if bool(command) == (preset is not None):
        raise GradreelError(
            "record needs one thing to run: write `gradreel record OUT -- python train.py` or "
            "`gradreel record --preset demo OUT`"
        )
    at = record_at(
        every=every, bursts=bursts, roles=roles, streams=streams, experts=experts, dtype=dtype, budget=budget
    )
    if command:
        if steps is not None:
            raise GradreelError("--steps belongs to --preset; give a script its own arguments after its name")
        raise typer.Exit(record_script(path, command, at))
    from ablations.demo import record_preset
    from ablations.presets import recording

    chosen = recording(str(preset))
    record_preset(chosen if steps is None else chosen.shortened(steps), path, at)
    print(f"Trace: {as_place(path)}")


def _bench_recorder(**options: Any) -> None:
    from ablations.bench_recorder import run_bench

    run_bench(**options)


def _load_plugins(files: Sequence[Path]) -> None:
    """Load the user's own files, after the registries that their constants belong to."""
    from toolkit.cli import KINDS
    from traces.registry import load_plugin_file

    for package, _ in KINDS.values():
        importlib.import_module(package)
    for file in files:
        load_plugin_file(file)


def plugins_first(arguments: Sequence[str]) -> list[str]:
    """Move each `--plugin FILE` to the front, so that it may stand anywhere before a `--`."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    front: list[str] = []
    rest: list[str] = []
    taken = iter(words[:end])
    for word in taken:
        if word == "--plugin":
            front += [word, *([file] if (file := next(taken, None)) is not None else [])]
        elif word.startswith("--plugin="):
            front.append(word)
        else:
            rest.append(word)
    return front + rest + words[end:]


def version_lines() -> list[str]:
    """The version, and a warning for each other distribution that installs a package of one of our names."""
    try:
        version = metadata.version("gradreel")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    lines = [f"gradreel {version}"]
    owners = metadata.packages_distributions()
    for package in _SHARED_NAMES:
        for name in sorted(set(owners.get(package, ())) - {"gradreel"}):
            foreign = metadata.distribution(name)
            lines.append(
                f"warning: the distribution {name} {foreign.version} installs another package {package!r} at "
                f"{str(foreign.locate_file(package))!r}; uninstall it, then reinstall gradreel"
            )
    return lines


def _place_of(package: str) -> Path | None:
    """The folder that `import package` would take it from."""
    spec: Any = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent


if __name__ == "__main__":
    main()
