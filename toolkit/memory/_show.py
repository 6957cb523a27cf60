"""Plans as tables for a terminal of 80 columns. Bytes, GiB and GB each under their own heading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.memory._plan import CATEGORIES, MemoryPlan
from toolkit.memory._reported import reported_for
from toolkit.memory._units import GB, GIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WORDS = {
    "weight_bytes": "weights",
    "gradient_bytes": "gradients",
    "state_bytes": "optimizer state",
    "pinned_gradient_bytes": "pinned gradient",
    "step_counter_bytes": "step counters",
    "master_weight_bytes": "master weights",
    "activation_bytes": "activations",
    "step_temporary_bytes": "step temporaries",
    "workspace_bytes": "workspace",
}
#: Categories whose roles are shown below them.
_BY_ROLE = ("state_bytes", "pinned_gradient_bytes")
_ALWAYS = ("weight_bytes", "gradient_bytes", "state_bytes", "pinned_gradient_bytes")


def print_plan(console: Console, plan: MemoryPlan) -> None:
    """One plan: a line per category, its roles where that matters, the phases and what was assumed."""
    console.print(f"{plan.recipe} on {plan.model}", style="bold", markup=False)
    console.print(describe_run(plan), markup=False)
    table = _table("", "bytes", "GiB", "GB")
    for category in CATEGORIES:
        total = plan.bytes_of(category)
        if not total and category not in _ALWAYS:
            continue
        table.add_row(_WORDS[category], *_amounts(total))
        roles = [r for r in plan.roles if (category, r) in plan.rows] if category in _BY_ROLE else []
        for role in roles:
            table.add_row(f"  {role}", *_amounts(plan.bytes_of(category, role)), style="dim")
    table.add_section()
    for phase, count in plan.phases.items():
        top = phase == plan.peak_phase
        table.add_row(f"{'peak: ' if top else ''}{phase}", *_amounts(count), style="bold" if top else "")
    if plan.host_bytes:
        table.add_row("on the host", *_amounts(plan.host_bytes))
    console.print(table)
    for note in plan.notes:
        console.print(f"Note: {note}.", markup=False)
    console.print()


def describe_run(plan: MemoryPlan) -> str:
    """Model size, tokens, layout and switches in one line."""
    run, precision = plan.run, plan.precision
    steps = f" x {run.micro_steps} micro-steps" if run.micro_steps > 1 else ""
    words = [
        f"{plan.parameters:,} parameters",
        f"{run.batch} x {run.sequence} tokens{steps}",
        plan.parallel.describe(),
        *([f"{run.checkpointing} checkpointing"] if run.checkpointing != "none" else []),
        *([f"{run.attention} attention"] if run.attention != "flash" else []),
        *(["state on the host"] if run.offload else []),
        *([f"{name} in {dtype}" for name, dtype in vars(precision).items() if dtype is not None]),
        *(["the original's step"] if run.step == "original" else []),
    ]
    return "; ".join(words)


def print_side_by_side(console: Console, plans: Sequence[MemoryPlan]) -> None:
    """Several recipes: state, pinned gradient and peak, in GiB and in GB."""
    table = _table(
        "recipe", "state\n[GiB]", "state\n[GB]", "pinned\n[GiB]", "pinned\n[GB]", "peak\n[GiB]", "peak\n[GB]"
    )
    for plan in plans:
        cells = [f"{count / size:,.3f}" for count in _kept(plan) for size in (GIB, GB)]
        table.add_row(plan.recipe, *cells)
    console.print(table)
    console.print()


def print_reported(console: Console, recipes: Sequence[str]) -> None:
    """The accuracy that papers report for these recipes, said to be theirs."""
    figures = [figure for name in recipes for figure in reported_for(name)]
    if not figures:
        return
    console.print("Accuracy as papers report it (not measured here):", markup=False)
    settings = dict.fromkeys((figure.setting, figure.source) for figure in figures)
    for setting, source in settings:
        values = [f"{f.recipe} {f.value}" for f in figures if (f.setting, f.source) == (setting, source)]
        console.print(f"  {setting} ({source}): {', '.join(dict.fromkeys(values))}", markup=False)
    console.print()


def plain(plans: Sequence[MemoryPlan], answers: Sequence[Any] = ()) -> dict[str, Any]:
    """Everything as plain values for JSON; sizes are in bytes."""
    names = list(dict.fromkeys(plan.recipe for plan in plans))
    return {
        "unit": "bytes",
        "plans": [plan.to_dict() for plan in plans],
        "answers": list(answers),
        "reported": [vars(figure) for name in names for figure in reported_for(name)],
    }


def _kept(plan: MemoryPlan) -> tuple[int, int, int]:
    return plan.state_bytes, plan.pinned_gradient_bytes, plan.peak_bytes


def _amounts(count: int) -> tuple[str, str, str]:
    return f"{count:,}", f"{count / GIB:,.3f}", f"{count / GB:,.3f}"


def _table(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
