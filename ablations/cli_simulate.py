"""The verb `simulate`; its work is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traces.console import example, out, say

if TYPE_CHECKING:
    from ablations.simulate import Effect, SimulationResult


def register(app: typer.Typer) -> None:
    """Add the verb to a command-line application."""
    app.command(epilog=example("gradreel simulate smoothing_phase --out runs/phase"))(simulate)


def bench(**options: Any) -> None:
    """`gradreel bench simulate`."""
    from ablations.simulate.bench import run_bench

    run_bench(**options)


def simulate(
    preset: Annotated[
        str | None, typer.Argument(metavar="[PRESET]", help="A simulation; none: list them.", show_default=False)
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where the frame goes; what is there is taken up.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Fewer or more steps than the preset's.")] = None,
    seeds: Annotated[int | None, typer.Option(min=3, help="Only the first so many seeds.")] = None,
    world: Annotated[
        list[str] | None, typer.Option("--world", metavar="NAME", help="Only this world, such as tokens=1; repeatable.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: one per processor.")] = None,
) -> None:
    """Run linear experts with a known optimum in a closed loop, and say which rule reaches the lower risk where."""
    from ablations.simulate.presets import SIMULATIONS

    if preset is None:
        for item in SIMULATIONS.all():
            out().print(f"{item.name}: {item.question}", soft_wrap=True, markup=False)
        return
    from ablations.simulate import simulate as run_simulation

    chosen = SIMULATIONS.get(preset).smaller(steps=steps, seeds=seeds, worlds=world)
    say(f"{chosen.name}: {chosen.configurations} configurations in {len(chosen.worlds)} worlds")
    show(run_simulation(chosen, out=folder, threads=threads))


def show(result: SimulationResult) -> None:
    """Print the question, a table a world, and what decides."""
    import numpy as np
    from rich.table import Table

    console, chosen = out(), result.simulation
    console.print(chosen.question, soft_wrap=True, markup=False)
    effects = {(e.world, e.arm, e.way): e for e in result.effects}
    for each in result.worlds:
        table = Table("arm", "risk", "lr", "tuned", "shared lr", "norms matched", title=each.label, box=None)
        for arm in chosen.arms:
            risks = each.risk[arm, "tuned"]
            risk = f"{np.exp(np.log(risks).mean()):.3g}" if np.isfinite(risks).all() else "diverged"
            ways = [effects.get((each.label, arm, way)) for way in ("tuned", "shared", "matched")]
            lr = f"{each.tuned[arm]:.3g}{'*' if each.edge[arm] else ''}"
            table.add_row(arm, risk, lr, *(_words(effect) for effect in ways))
        console.print(table)
    console.print(
        f"Ratios: risk of {chosen.baseline} over that of the arm, 95% interval over {len(chosen.seeds)} paired seeds; "
        f"threshold {chosen.threshold}; * tuned lr on the edge of its grid.",
        soft_wrap=True,
        markup=False,
    )
    console.print(f"Decides: {chosen.decides}", soft_wrap=True, markup=False)
    for note in result.notes:
        say(f"warning: {note}")
    if result.path is not None:
        console.print(f"Frame: {result.path / 'frame.parquet'}", soft_wrap=True, markup=False)


def _words(effect: Effect | None) -> str:
    if effect is None:
        return "baseline"
    if effect.ratio != effect.ratio:
        return f"diverged: {effect.verdict}"
    return f"{effect.ratio:.3g} ({effect.low:.3g}, {effect.high:.3g}) {effect.verdict}"
