"""The verb `measure`: memory of a live run beside its plan, for a user's own script or a preset."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traces.console import example
from traces.errors import GradreelError

if TYPE_CHECKING:
    from toolkit.memory import MemoryPlan
    from toolkit.memory._measure import Meter


def register(app: typer.Typer) -> None:
    """Add the verb to a command-line application."""
    app.command(epilog=example("gradreel measure -- python train.py --steps 10"))(measure)


def measure(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- python SCRIPT [ARGS]]", help="Your own training script.", show_default=False),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="Train this preset instead of a script.")] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", metavar="NAME", help="What trains the preset, or what to plan for.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a preset.")] = 3,
) -> None:
    """Measure the memory of a training run by category and print it beside the plan, with the difference."""
    if bool(command) == (preset is not None):
        raise GradreelError(
            "measure needs one thing to run: write `gradreel measure -- python train.py` or "
            "`gradreel measure --preset demo`"
        )
    if preset is not None:
        for line in measure_preset(preset, recipe or "adamw", steps):
            print(line)
        return
    from traces.bootstrap import split_command

    interpreter, flags, target = split_command(command or [])
    wanted = ["--recipe", recipe] if recipe else []
    own = Path(__file__).resolve().parent.parent
    code = f"import sys; sys.path.append({str(own)!r}); from ablations.cli_measure import main; sys.exit(main())"
    raise typer.Exit(subprocess.run([interpreter, *flags, "-c", code, *wanted, "--", *target]).returncode)


def measure_preset(preset: str, recipe: str, steps: int = 3) -> list[str]:
    """Train a preset's model for some steps with one of this project's optimizers; the table as lines."""
    import torch

    from ablations.data.corpus import stdlib_corpus
    from ablations.models import MoELanguageModel
    from ablations.presets import PRESETS
    from toolkit.memory._measure import Meter
    from toolkit.optim import make_optimizer

    chosen: Any = PRESETS.get(preset)
    config: Any = getattr(chosen, "model", None)
    if not hasattr(config, "num_experts"):
        raise GradreelError(f"preset {preset} names no model of this project; measure --preset demo, or a script")
    corpus = stdlib_corpus()
    torch.manual_seed(chosen.seed)
    model = MoELanguageModel(config)
    optimizer = make_optimizer(model, recipe)
    model.train()
    with Meter() as meter:  # a plain loop: `train` would keep a fresh gradient beside hidden momentum, to clip it
        for step in range(1, steps + 1):
            out = model(**corpus.batch(chosen.seed, step, chosen.batch, chosen.length, 0))
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return meter.require().lines(plan_of(meter, optimizer.recipe))


def plan_of(meter: Meter, recipe: Any = None) -> MemoryPlan | None:
    """The plan of what a meter saw; None where the optimizer's recipe is not known and none is given."""
    import torch

    from toolkit.memory import plan_memory
    from toolkit.variants import recipe as named

    optimizer, seen = meter.optimizer, meter.measured
    recipe = recipe or getattr(optimizer, "recipe", None)
    if recipe is None and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        recipe = "adamw"
    if recipe is None and isinstance(optimizer, torch.optim.SGD):
        recipe = named("sgd", momentum=max(group["momentum"] for group in optimizer.param_groups))
    if recipe is None or meter.model is None:
        return None
    attached = any(hidden.active for hidden in getattr(optimizer, "_hidden", {}).values())
    return plan_memory(
        meter.model,
        recipe,
        batch=max(1, seen.batch),
        sequence=max(1, seen.sequence),
        micro_steps=max(1, seen.micro_steps),
        hidden_momentum="attached" if attached else "apart",
    )


class _Finisher:
    """What `traces.bootstrap` calls when the script has ended."""

    def __init__(self, recipe: str | None) -> None:
        from toolkit.memory._measure import Meter

        self.recipe, self.meter = recipe, Meter()
        self.meter.__enter__()

    def finish(self, kind: Any, error: Any, at: Any) -> None:
        """Print the table; nothing after an exception, which speaks for itself."""
        self.meter.__exit__()
        if kind is not None and not self.meter.measured.steps:
            return
        measured = self.meter.require()
        try:
            plan = plan_of(self.meter, self.recipe)
        except GradreelError as error_of_plan:
            plan = None
            print(f"gradreel: no plan: {error_of_plan}", file=sys.stderr)
        for line in measured.lines(plan):
            print(line)
        if plan is None:
            print("No plan beside it: name the optimizer's recipe with --recipe NAME.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script under the meter: `[--recipe NAME] -- script.py args`; returns its exit code, 2 for a wrong use."""
    from traces.bootstrap import _run

    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--")
    own, target = words[:at], words[at + 1 :]
    try:
        return _run(_Finisher(own[1] if own else None), target)  # type: ignore[arg-type]
    except GradreelError as error:
        print(f"gradreel: {error}", file=sys.stderr)
        return 2
