"""The verbs that need optimizers, metrics or plots: replay, compare, report, list, bench.

Imported whenever the command starts, so nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traces._store import StorePath, as_place
from traces.console import CheckFailed, example, out, say
from traces.errors import GradreelError, unknown

if TYPE_CHECKING:
    from traces.registry import Registry

#: What a replay runs where no recipe is named.
DEFAULT_RECIPES = ("adamw", "skewadam", "sinkgd", "mesh")
#: What a replay measures where no metric is named, as far as the trace can supply it; the report's plots draw these.
DEFAULT_METRICS = (
    "update_rms",
    "update_cos",
    "update_sign_flip_rate",
    "cos_to_gradient",
    "amplification",
    "zombie_displacement",
    "relative_update",
    "grad_norm",
    "grad_cos",
    "sign_flip_rate",
    "tokens_per_expert",
    "expert_load",
    "max_vio",
    "state_bytes",
    "pinned_gradient_bytes",
    "step_ms",
)
#: Metrics whose plots need a row per expert.
_PER_EXPERT = ("expert_load", "tokens_per_expert")

TraceArgument = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="The trace: a folder, or a URL.", show_default=False, parser=as_place),
]
RecipeOption = Annotated[
    list[str] | None,
    typer.Option("--recipe", "-r", metavar="NAME", help="A recipe such as mesh+sign_only; repeat for several."),
]
GapsOption = Annotated[
    str | None, typer.Option(metavar="POLICY", help="What state does at missing steps: bursts (restarts) or ignore.")
]
MatchOption = Annotated[
    str | None, typer.Option(metavar="RULE", help="update_rms scales every update to the first recipe's RMS.")
]
LrOption = Annotated[
    list[str] | None,
    typer.Option("--lr", metavar="NAME=VALUE", help="Base rate of a recipe, or NAME=recorded; repeat for several."),
]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]
BackendOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Kernels: reference, eager, cpu, triton, cuda.")
]
ParamOption = Annotated[
    list[str] | None, typer.Option("--param", metavar="NAME", help="Only this parameter; repeat for several.")
]
StepsOption = Annotated[str | None, typer.Option(metavar="FIRST:LAST", help="Only these recorded steps.")]
SeedOption = Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of stochastic rounding.")]
PluginOption = Annotated[
    list[Path] | None, typer.Option("--plugin", metavar="FILE.py", help="Load a plug-in file of yours first.")
]


def register(app: typer.Typer) -> None:
    """Add the verbs of this floor to a command-line application."""
    app.command(epilog=example("gradreel replay run.trace -r adamw -r mesh+sign_only -m update_cos"))(replay)
    app.command(epilog=example("gradreel compare run.trace -r adamw -r sinkgd -r mesh"))(compare)
    app.command(epilog=example("gradreel report run.replay.parquet --out run.html"))(report)
    app.command("list", epilog=example("gradreel list metrics"))(list_kind)
    app.command(epilog=example("gradreel bench sr_sinkhorn"))(bench)


def replay(
    trace: TraceArgument,
    recipe: RecipeOption = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", metavar="NAME", help="A metric; repeat for several.")
    ] = None,
    lag: Annotated[list[int] | None, typer.Option(min=1, help="A lag in steps; repeat for several.")] = None,
    per_expert: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC", help="Write a row per expert for this metric, or for 'all'; repeatable."),
    ] = None,
    match: MatchOption = None,
    gaps: GapsOption = None,
    lr: LrOption = None,
    backend: BackendOption = None,
    device: DeviceOption = "cpu",
    param: ParamOption = None,
    steps: StepsOption = None,
    seed: SeedOption = 0,
    check: Annotated[
        bool, typer.Option("--selfcheck", help="First replay the recorded optimizer; exit 1 unless bit-exact.")
    ] = False,
    out_file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Parquet file; default: TRACE's name.replay.parquet.")
    ] = None,
    plugin: PluginOption = None,
) -> None:
    """Replay a trace through recipes and measure their updates (open-loop: it compares updates, not losses).

    A trace without gradients, an imported log for instance, has its routing measured: no recipe is needed.
    """
    _load_plugins(plugin)
    from toolkit.replay import replay as run_replay
    from toolkit.replay import selfcheck
    from toolkit.report._summary import print_summary

    opened = _open(trace)
    if check:
        found = selfcheck(opened)
        say(f"selfcheck: {found.message}")
        found.require()
    chosen = list(metric) if metric else _default_metrics(opened)
    result = run_replay(
        opened,
        _recipes(recipe, opened),
        chosen,
        lags=list(lag) if lag else None,
        per_expert=_per_expert(per_expert, chosen),
        match=match,
        gaps=gaps,
        lr=_rates(lr),
        backend=backend,
        device=device,
        params=param,
        steps=_steps(steps),
        seed=seed,
        out=out_file or _default_out(trace, "replay"),
    )
    print_summary(out(), result.frame, notes=result.notes, path=result.path)


def compare(
    trace: TraceArgument,
    recipe: RecipeOption = None,
    match: MatchOption = None,
    gaps: GapsOption = None,
    lr: LrOption = None,
    backend: BackendOption = None,
    device: DeviceOption = "cpu",
    param: ParamOption = None,
    steps: StepsOption = None,
    seed: SeedOption = 0,
    out_file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Parquet file; default: TRACE's name.compare.parquet.")
    ] = None,
    plugin: PluginOption = None,
) -> None:
    """Show how far the updates and weights of recipes are from each other on one trace, pair by pair."""
    _load_plugins(plugin)
    from toolkit.replay import compare as run_compare
    from toolkit.report._summary import print_summary

    result = run_compare(
        _open(trace),
        list(recipe or DEFAULT_RECIPES),
        match=match,
        gaps=gaps,
        lr=_rates(lr),
        backend=backend,
        device=device,
        params=param,
        steps=_steps(steps),
        seed=seed,
        out=out_file or _default_out(trace, "compare"),
    )
    print_summary(out(), result.frame, notes=result.notes, path=result.path)


def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FRAME",
            help="The parquet file of a replay, a trace, or the folder of an experiment.",
            show_default=False,
            parser=as_place,
        ),
    ],
    out_file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="HTML file; default: FRAME's name with .html.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    recipe: RecipeOption = None,
    gaps: GapsOption = None,
    plugin: PluginOption = None,
) -> None:
    """Write one self-contained HTML report: verdict first, then figures, tables and provenance."""
    _load_plugins(plugin)
    for is_mine, write in REPORTS:
        if not isinstance(source, StorePath) and is_mine(source):
            if out_file or title or recipe or gaps:
                raise GradreelError(f"{str(source)!r} says itself what its report is; give the folder alone")
            write(source)
            return
    from toolkit.frame import read_frame, read_provenance

    file = source
    if source.is_dir():
        from toolkit.replay import replay as run_replay

        opened, file = _open(source), _default_out(source, "replay")
        chosen = _default_metrics(opened)
        options: dict[str, Any] = {"gaps": gaps, "per_expert": _per_expert(None, chosen), "out": file}
        run_replay(opened, _recipes(recipe, opened), chosen, **options)
        say(f"replayed into {file}")
    elif isinstance(source, StorePath):
        raise GradreelError(f"{str(source)!r} is no trace; a frame is read from this machine, copy it here")
    elif recipe or gaps:
        raise GradreelError(f"{str(source)!r} is a frame, which is replayed already; --recipe and --gaps need a trace")
    frame, provenance = read_frame(file), read_provenance(file)
    from toolkit.report import write_report

    page = out_file or file.with_suffix(".html")
    written = write_report(
        page,
        frame,
        title=title or f"Replay of {_trace_name(provenance, file)}",
        provenance=provenance,
        notes=provenance.get("notes") or (),
    )
    console = out()
    console.print(written.verdict, markup=False)
    console.print(f"Report: {written.path}", markup=False, soft_wrap=True)


#: Reports of floors above: whether a folder is theirs, and what writes its report and prints where it is.
REPORTS: list[tuple[Callable[[Path], bool], Callable[[Path], None]]] = []


def add_report(is_mine: Callable[[Path], bool], write: Callable[[Path], None]) -> None:
    """Let `gradreel report FOLDER` call `write(folder)` where `is_mine(folder)`; for floors above this one."""
    REPORTS.append((is_mine, write))


# ------------------------------------------------------------------------------------------------------------- list

#: Plug-in kinds by the word of the command line: dotted package and the name of its registry.
KINDS: dict[str, tuple[str, str]] = {
    "recipes": ("toolkit.recipes", "RECIPES"),
    "variants": ("toolkit.variants", "VARIANTS"),
    "metrics": ("toolkit.metrics", "METRICS"),
    "plots": ("toolkit.plots", "PLOTS"),
    "stages": ("toolkit.stages", "STAGES"),
}


def add_kind(word: str, package: str, registry: str) -> None:
    """Let `gradreel list WORD` show the registry called `registry` in `package`; for floors above this one."""
    KINDS[word] = (package, registry)


def list_kind(
    kind: Annotated[str | None, typer.Argument(metavar="KIND", help="recipes, variants, metrics, plots, ...")] = None,
    plugin: PluginOption = None,
) -> None:
    """List the plug-ins of a kind by name, each with one line about it."""
    _load_plugins(plugin)
    from rich.table import Table

    if kind is not None and kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    if kind is None:
        for word in KINDS:
            names = _registry(word).names()
            table.add_row(word, f"{len(names)}: {', '.join(names)}")
    else:
        for name, summary in _summaries(_registry(kind)):
            table.add_row(name, summary)
    out().print(table)


def _registry(word: str) -> Registry[Any]:
    import importlib

    package, name = KINDS[word]
    return getattr(importlib.import_module(package), name)


def _summaries(registry: Registry[Any]) -> Iterator[tuple[str, str]]:
    """Name and one sentence of each plug-in, read from the source of its file, so that none is imported."""
    import importlib

    folders = [Path(folder) for folder in importlib.import_module(registry.package).__path__]
    for name in registry.names():
        file = next((f for folder in folders if (f := folder / f"{name}.py").is_file()), None)
        if file is not None:
            text = _sentence(file.read_text(encoding="utf-8"))
        else:
            item = registry.get(name)
            text = next((t for key in ("summary", "doc", "caption") if (t := getattr(item, key, ""))), "")
        yield name, " ".join(text.split("\n\n")[0].split())


def _sentence(source: str) -> str:
    """The literal `summary=` of the plug-in a file defines, else the start of its docstring."""
    import ast

    module = ast.parse(source)
    for statement in module.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            for keyword in statement.value.keywords:
                if keyword.arg == "summary" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
    return ast.get_docstring(module) or ""


# ------------------------------------------------------------------------------------------------------------ bench

#: Benchmarks of floors above, by name: a function that takes (json: bool, pairs: int | None).
BENCHES: dict[str, Callable[..., Any]] = {}


def add_bench(name: str, run: Callable[..., Any]) -> None:
    """Let `gradreel bench NAME` call `run(json=..., pairs=...)`; for floors above this one."""
    BENCHES[name] = run


def bench(
    op: Annotated[
        str, typer.Argument(metavar="OP", help="A kernel such as sr_sinkhorn, all, or recorder.", show_default=False)
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of lines.")] = False,
    pairs: Annotated[int | None, typer.Option(min=3, help="Timed rounds; every one times all forms once.")] = None,
    device: DeviceOption = "cpu",
    peer: Annotated[
        Path | None, typer.Option(metavar="FILE.py", help="Functions of yours, named as ops, timed beside ours.")
    ] = None,
) -> None:
    """Time an op against what people would use instead, in pairs, after its checks have passed."""
    if op in BENCHES:
        BENCHES[op](json=json, pairs=pairs)
        return
    from toolkit.kernels import _bench

    if op not in (*_bench.OPS, "all"):
        raise unknown("benchmark", op, (*_bench.OPS, *BENCHES, "all"))
    rounds = pairs or _bench.MIN_ROUNDS
    if not json:
        failed = _bench.run(op, device, peer=peer, rounds=rounds, echo=lambda line: out().print(line, markup=False))
    else:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "bench.json"
            failed = _bench.run(op, device, json_path=file, peer=peer, rounds=rounds, echo=say)
            print(file.read_text(encoding="utf-8"), end="")
    if failed:
        raise CheckFailed(f"bench {op}: a check failed, see above; nothing was timed for it")


# ---------------------------------------------------------------------------------------------------------- helpers


def _load_plugins(files: Iterable[Path] | None) -> None:
    from traces.registry import load_plugin_file

    if files:
        for word in KINDS:
            _registry(word)  # a plug-in's constants find their registries
    for file in files or ():
        load_plugin_file(file)


def _open(path: Path) -> Any:
    from traces.reader import open_trace

    return open_trace(path)


def _default_out(trace: Path, verb: str) -> Path:
    """`runs/demo.trace` gives `demo.replay.parquet` in the working folder."""
    return Path(f"{trace.resolve().name.removesuffix('.trace')}.{verb}.parquet")


def _trace_name(provenance: dict[str, Any], file: Path) -> str:
    recorded = provenance.get("trace") if isinstance(provenance.get("trace"), dict) else None
    return Path(str(recorded.get("path", file))).name if recorded else file.name


def _recipes(named: list[str] | None, trace: Any) -> list[str]:
    """The recipes named, else the usual ones; none for a trace without gradients, of which routing is measured."""
    return list(named or (DEFAULT_RECIPES if "gradient" in trace.streams else ()))


def _default_metrics(trace: Any) -> list[str]:
    """The default metrics that exist and whose streams this trace has."""
    from toolkit.metrics import METRICS, TRACE_NEEDS

    if "gradient" not in trace.streams:
        from toolkit.replay import routing_metrics

        return routing_metrics(trace)
    streams = {*trace.streams, "presence"}
    known = set(METRICS.names())
    chosen = [METRICS.get(name) for name in DEFAULT_METRICS if name in known]
    weights = bool(trace.steps) and trace.steps[0] in trace.weight_steps()
    lacking = {need for need in TRACE_NEEDS if need not in streams} | (set() if weights else {"weight", "delta"})
    return [metric.name for metric in chosen if not lacking & set(metric.needs)]


def _per_expert(names: list[str] | None, metrics: list[str]) -> Any:
    if names == ["all"]:
        return True
    if names:
        return names
    return [name for name in _PER_EXPERT if name in metrics]


def _rates(pairs: list[str] | None) -> dict[str, str] | None:
    """`["adamw=1e-3"]` -> {"adamw": "1e-3"}; a recipe's own `=` signs stand before the last one."""
    if not pairs:
        return None
    found: dict[str, str] = {}
    for pair in pairs:
        name, mark, value = pair.rpartition("=")
        if not mark or not name or not value:
            raise GradreelError(f"--lr {pair!r} is not NAME=VALUE; write --lr adamw=1e-3 or --lr adamw=recorded")
        if name in found:
            raise GradreelError(f"--lr gives {name} twice, {found[name]} and {value}; give it once")
        found[name] = value
    return found


def _steps(text: str | None) -> tuple[int | None, int | None] | None:
    """`"10:20"` -> (10, 20); either end may be left out."""
    if text is None:
        return None
    first, mark, last = text.partition(":")
    try:
        ends = (int(first) if first else None, int(last) if last else None)
    except ValueError:
        mark, ends = "", (None, None)
    if not mark:
        raise GradreelError(f"--steps {text!r} is not FIRST:LAST; write --steps 10:20, --steps 10: or --steps :20")
    return ends
