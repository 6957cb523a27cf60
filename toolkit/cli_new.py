"""The verb `new`: a plug-in file of the user's own, working as it is, to be changed from there.

The texts below are whole small plug-ins. Each passes the contract tests of its kind under any name.
"""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import Annotated

import typer

from traces.console import example, out
from traces.errors import GradreelError, unknown

_METRIC = '''"""NAME: how much of the gradient's square the largest row of each expert holds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from toolkit.metrics import Measure, Metric, Subject, nothing
from traces.views import StepView


def update(state: Subject, view: StepView) -> Iterable[Measure]:
    """One value per expert [E]: NaN where it was not recorded or has no gradient, inf where that is not finite."""
    value, support = np.full(state.experts, np.nan), np.zeros(state.experts)
    if view.gradient is not None:
        rows = view.gradient.double().square()
        rows = rows.reshape(len(rows), -1, rows.shape[-1]).sum(-1) if state.experts > 1 else rows.reshape(1, -1)
        ids = range(state.experts) if view.experts is None else view.experts
        for expert, squares in zip(ids, rows, strict=True):
            total = float(squares.sum())
            if not np.isfinite(total):
                value[expert], support[expert] = np.inf, 1.0
            elif total > 0:
                value[expert], support[expert] = float(squares.max()) / total, 1.0
    yield Measure(value, view.step, support=support)


METRIC = Metric(
    name="NAME",
    group="gradient",
    needs=("gradient",),
    scope="parameter",
    unit="1",
    formula="max over rows r of |g_r|^2 / |g|^2",
    citation="definition of this project",
    init=lambda subject: subject,
    update=update,
    result=nothing,
    doc="1 where a single row holds the whole gradient; null where the gradient is zero. Support: 1 per expert.",
)
'''

_STAGE = '''"""NAME: cut every element to a multiple of the matrix's RMS."""

from __future__ import annotations

from torch import Tensor

from toolkit.stages import Context, Slots, Stage, defaults_of


def cut(x: Tensor, slots: Slots, ctx: Context, *, limit: float = 3.0) -> Tensor:
    """x [.., m, n] with |x_ij| at most limit * RMS(x) of its own matrix. Never writes into x; slots hold state."""
    axes = tuple(range(x.ndim))[-2:]
    rms = x.square().mean(axes, keepdim=True).sqrt() if axes else x.abs()
    return x.clamp(-limit * rms, limit * rms)


STAGE = Stage("NAME", cut, options=defaults_of(cut), doc=cut.__doc__ or "")
'''

_RECIPE = '''"""NAME: descent along the sign of a smoothed gradient."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes import REST, IdlePolicy, Recipe, RecipeFamily, interval
from toolkit.recipes import _checks as checks
from toolkit.stages import chain
from toolkit.stages._make import stage


@dataclass(frozen=True)
class Options:
    """The switches; `idle` says what becomes of an expert without tokens."""

    lr: float = 1e-3
    beta: float = 0.9
    weight_decay: float = 0.0
    idle: IdlePolicy = "skip"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        checks.common(self.lr, self.weight_decay, self.idle, self.rounding)
        interval("beta", self.beta, 0.0, 1.0, open_high=True)


def build(options: Options) -> Recipe:
    """A table from roles to chains; REST serves every role that has no row of its own."""
    last = stage("apply", weight_decay=options.weight_decay, rounding=options.rounding)
    return Recipe(
        name="NAME",
        groups={REST: chain(stage("heavy_ball", beta=options.beta), stage("sign"), last)},
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 1.0, "ours": 1.0},  # float32 elements a step needs beside state, per element
    )


RECIPE = RecipeFamily(
    name="NAME",
    options=Options,
    build=build,
    paper="Bernstein et al. 2018",
    summary="the sign of a decayed sum of gradients, on every role",
    checked_against="nothing yet; compare it with an implementation you trust",
    rate="not tuned",
)
'''

_VARIANT = '''"""NAME: another base rate for the routed experts alone."""

from __future__ import annotations

from dataclasses import replace

from toolkit.recipes import Recipe
from toolkit.stages import Chain
from toolkit.variants import Variant
from toolkit.variants._edit import changed, edit_rows
from traces.errors import GradreelError


def change(recipe: Recipe, factor: float = 0.5, rows: str = "experts") -> Recipe:
    """The recipe with the rate of these rows times `factor`. One that changes nothing is an error."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
        raise GradreelError(f"factor is {factor!r}; allowed: numbers in (0, inf)")

    def edit(chain: Chain) -> Chain:
        return replace(chain, lr_scale=chain.lr_scale * factor)

    return changed(recipe, edit_rows(recipe, rows, edit), "NAME", "its factor is 1")


VARIANT = Variant("NAME", change, "NAME", "another rate of experts")
'''

_PLOT = '''"""NAME: the median update of each recipe against the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from toolkit.plots import Plot
from toolkit.plots._theme import WIDTHS, Width, recipe_order, recipe_styles, themed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(frame: pl.DataFrame, *, width: Width = "page") -> Figure:
    """One line per recipe: the median of `update_rms` over parameters and experts. A plot sees only the frame."""
    from matplotlib.figure import Figure

    rows = frame.filter((pl.col("metric") == "update_rms") & pl.col("value").is_finite())
    rows = rows.drop_nulls("step").with_columns(pl.col("recipe").cast(pl.String).fill_null("recorded"))
    table = rows.group_by("recipe", "step").agg(pl.col("value").cast(pl.Float64).median()).sort("step")
    figure = Figure(figsize=(WIDTHS[width], 2.6), layout="constrained")
    ax = figure.subplots()
    styles = recipe_styles(table["recipe"].unique().to_list())
    for name in recipe_order(styles):
        line = table.filter(pl.col("recipe") == name)
        style = styles[name]
        ax.plot(line["step"], line["value"], color=style.colour, linestyle=style.line, marker=style.marker)
    if table.is_empty():
        ax.text(0.5, 0.5, "no value is defined", ha="center", transform=ax.transAxes)
    ax.set_xlabel("step [1]")
    ax.set_ylabel("update RMS [1]")
    return figure


PLOT = Plot(
    name="NAME",
    title="Median size of the updates",
    requires=("update_rms",),
    draw=themed(draw),
    caption="Median over parameters and experts of the update's RMS, before the lr, per recipe and step.",
)
'''

_PRESET = '''"""NAME: is momentum worth its memory on routed experts? Takes minutes."""

from __future__ import annotations

from ablations.presets import Ablation, Arm
from ablations.presets._sizes import few_tokens

ABLATION = Ablation(
    name="NAME",
    question="On routed experts, is SinkGD with momentum in the gradient buffer (MESH) better than SinkGD without?",
    decides="The interval of paired differences in loss, each arm at its own best rate; 0 inside it decides nothing.",
    baseline="without",
    arms={
        "without": Arm("sinkgd", "no momentum"),
        "with": Arm("mesh", "momentum of 0.9 before the normalisation"),
    },
    sizes={"cpu": few_tokens(grids={})},
)
'''

TEMPLATES = {
    "stage": _STAGE,
    "recipe": _RECIPE,
    "variant": _VARIANT,
    "metric": _METRIC,
    "plot": _PLOT,
    "preset": _PRESET,
}
_TRY = {
    "stage": "gradreel list stages --plugin {file}",
    "recipe": "gradreel replay TRACE -r {name} --plugin {file}",
    "variant": "gradreel replay TRACE -r mesh -r mesh+{name} --plugin {file}",
    "metric": "gradreel replay TRACE -m {name} --plugin {file}",
    "plot": "gradreel report FRAME --plugin {file}",
    "preset": "gradreel run {name} --plugin {file}",
}


def register(app: typer.Typer) -> None:
    """Add the verb to a command-line application."""
    app.command(epilog=example("gradreel new metric row_share"))(new)


def new(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="stage, recipe, variant, metric, plot, preset.", show_default=False)
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is called, and its file.", show_default=False)],
    folder: Annotated[Path, typer.Option("--in", metavar="FOLDER", help="Where the file goes.")] = Path(),
) -> None:
    """Write a plug-in file of yours that works as it is, to start from."""
    file = write_plugin(kind, name, folder)
    console = out()
    console.print(f"{file}: a {kind} that works as it is; change it and try", markup=False, soft_wrap=True)
    console.print(_TRY[kind].format(name=name, file=file), markup=False, soft_wrap=True)


def write_plugin(kind: str, name: str, folder: str | Path = ".") -> Path:
    """Write `folder/NAME.py` with a small plug-in of this kind and return its path; an existing file is refused.

    `kind` is one of `TEMPLATES`; `name` must be an identifier in lower case that no plug-in of the kind has yet.
    """
    if kind not in TEMPLATES:
        raise unknown("kind", kind, TEMPLATES)
    if (
        not (name.isidentifier() and name.isascii() and name == name.lower())
        or name[0] == "_"
        or keyword.iskeyword(name)
    ):
        raise GradreelError(f"name {name[:60]!r} is no name of a plug-in; use lower-case letters, digits and _")
    if len(name) > 30:
        raise GradreelError(f"name {name[:60]!r} has {len(name)} characters; at most 30 are allowed")
    if name in _taken(kind):
        raise GradreelError(f"{kind} {name!r} exists already; choose another name")
    file = Path(folder) / f"{name}.py"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "x", encoding="utf-8") as target:
            target.write(TEMPLATES[kind].replace("NAME", name))
    except FileExistsError:
        raise GradreelError(f"{str(file)!r} is there already; choose another name, or --in another folder") from None
    except OSError as error:
        raise GradreelError(f"{str(file)!r} cannot be written: {error.strerror or error}") from None
    return file


def _taken(kind: str) -> list[str]:
    import importlib

    from toolkit.cli import KINDS

    place = KINDS.get(f"{kind}s")
    if place is None:
        return []
    registry = getattr(importlib.import_module(place[0]), place[1])
    return list(registry.names())
