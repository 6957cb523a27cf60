"""Answers that a plan gives: does it fit, what is the least change that makes it fit, which layout of many GPUs fits.

Every change has a cost, a rough order of how much it hurts (1 is about a tenth of the speed, or as much trouble);
candidates are tried from the cheapest on, and the first that fits is the answer, so it is the least by this table:

| change | cost |
| --- | --- |
| eager attention -> flash | 0.5 |
| half the micro-batch (twice the micro-steps: the same gradient) | 1 each time |
| selective, full checkpointing | 2, 4 |
| master weights left out (stochastic rounding instead) | 3 |
| float32 -> bfloat16 weights | 5 |
| state and master weights on the host | 8 |
| FSDP over 2, 4, 8, ... GPUs | 10 each time they double |
| experts shared by those GPUs as well | 1 |

In a layout of a given number of GPUs: expert parallelism 1, pipeline 3, tensor 4, each time the degree doubles; FSDP
takes what is left; checkpointing and offload as above.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from toolkit.memory._plan import PHASES, MemoryPlan, Planner
from toolkit.memory._ranks import num_experts
from toolkit.memory._settings import Parallel, Precision, Run
from toolkit.memory._units import both
from toolkit.recipes import Recipe
from traces.errors import GradreelError

CHECKPOINTING_COST = {"none": 0.0, "selective": 2.0, "full": 4.0}
OFFLOAD_COST = 8.0
_MOST_GPUS = 1024
_TENSOR = (1, 2, 4, 8)  # within one machine

Candidate = tuple[float, tuple[str, ...], Precision, Parallel, Run]


@dataclass(frozen=True)
class Fit:
    """Whether `plan` fits `budget` bytes, and if not the least change that does: `change` in words, `changed` its plan.

    Both are None where the plan fits, or where nothing that was tried does (`nearest` is then the smallest one).
    """

    plan: MemoryPlan
    budget: int
    change: tuple[str, ...] | None = None
    changed: MemoryPlan | None = None
    nearest: MemoryPlan | None = None

    @property
    def fits(self) -> bool:
        """Whether the plan fits as it is."""
        return self.plan.peak_bytes <= self.budget

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "recipe": self.plan.recipe,
            "fits": self.fits,
            "budget_bytes": self.budget,
            "room_bytes": self.budget - self.plan.peak_bytes,
            "change": None if self.change is None else list(self.change),
            "changed_peak_bytes": None if self.changed is None else self.changed.peak_bytes,
        }

    def lines(self) -> list[str]:
        """The answer in one or two sentences."""
        room = self.budget - self.plan.peak_bytes
        verdict = f"fits, with {both(room)} to spare" if room >= 0 else f"does not fit, by {both(-room)}"
        lines = [f"{self.plan.recipe}: needs {both(self.plan.peak_bytes)} of {both(self.budget)}: it {verdict}."]
        if self.change is not None and self.changed is not None:
            lines.append(f"Least change that fits: {', '.join(self.change)}: {both(self.changed.peak_bytes)}.")
        elif not self.fits and self.nearest is not None:
            lines.append(
                f"No change that was tried fits; the smallest needs {both(self.nearest.peak_bytes)} "
                f"({self.nearest.parallel.describe()})."
            )
        return lines


def fit(planner: Planner, recipe: Recipe, budget: int, *, precision: Precision, parallel: Parallel, run: Run) -> Fit:
    """Compare the plan with `budget` bytes and search for the least change where it does not fit."""
    plan = planner.plan(recipe, precision=precision, parallel=parallel, run=run)
    if plan.peak_bytes <= budget:
        return Fit(plan, budget)
    nearest = plan
    for _, words, prec, par, changed_run in sorted(
        _changes(planner, precision, parallel, run, plan.pinned_gradient_bytes > 0), key=lambda change: change[0]
    ):
        changed = planner.plan(recipe, precision=prec, parallel=par, run=changed_run)
        if changed.peak_bytes <= budget:
            return Fit(plan, budget, words, changed)
        nearest = min(nearest, changed, key=lambda p: p.peak_bytes)
    return Fit(plan, budget, nearest=nearest)


def _changes(
    planner: Planner, precision: Precision, parallel: Parallel, run: Run, pinned: bool = False
) -> Iterator[Candidate]:
    batches = [(float(n), run.batch >> n) for n in range(run.batch.bit_length()) if run.batch >> n >= 1]
    checkpointing = [(c, name) for name, c in CHECKPOINTING_COST.items() if c >= CHECKPOINTING_COST[run.checkpointing]]
    main = precision.weights or planner.arch.main_dtype
    weights = [(0.0, precision.weights), *([(5.0, "bfloat16")] if main in ("float32", "float64") else [])]
    masters = [(0.0, precision.master), *([(3.0, None)] if precision.master else [])]
    attention = [(0.0, run.attention), *([(0.5, "flash")] if run.attention == "eager" else [])]
    offload = [(0.0, run.offload), *([(OFFLOAD_COST, True)] if not run.offload else [])]
    alone = parallel.world == 1
    ranks = [(0.0, parallel), *(_sharded(planner) if alone else [])]
    for picks in itertools.product(batches, checkpointing, weights, masters, attention, offload, ranks):
        (_, batch), (_, check), (_, dtype), (_, master), (_, kernel), (_, host), (_, ranked) = picks
        words: list[str] = []
        if kernel != run.attention:
            words.append("flash attention")
        if batch != run.batch:
            words.append(f"micro-batch {batch} instead of {run.batch}")
        if check != run.checkpointing:
            words.append(f"{check} checkpointing")
        if master != precision.master:
            words.append("no master weights")
        if dtype != precision.weights:
            words.append("bfloat16 weights")
        if host != run.offload:
            words.append("optimizer state on the host" + (", momentum apart from gradients" if pinned else ""))
        if ranked != parallel:
            words.append(ranked.describe())
        if not words:
            continue
        steps = run.micro_steps * max(1, run.batch // batch)
        changed = replace(run, batch=batch, micro_steps=steps, checkpointing=check, attention=kernel, offload=host)
        if host and pinned:
            changed = replace(changed, hidden_momentum="apart")  # what hides in a gradient cannot leave the GPU
        cost = sum(cost for cost, _ in picks) - CHECKPOINTING_COST[run.checkpointing]
        yield cost, tuple(words), replace(precision, weights=dtype, master=master), ranked, changed


def _sharded(planner: Planner) -> list[tuple[float, Parallel]]:
    found = []
    experts = num_experts(planner.arch.params)
    degree = 2
    while degree <= _MOST_GPUS:
        cost = 10.0 * math.log2(degree)
        found.append((cost, Parallel(fsdp=degree)))
        shared = math.gcd(degree, *experts) if experts else 1
        if shared > 1:
            found.append((cost + 1.0, Parallel(fsdp=degree, expert=shared)))
        degree *= 2
    return found


def find_layout(
    planner: Planner, recipe: Recipe, gpus: int, budget: int, *, precision: Precision, run: Run
) -> tuple[MemoryPlan, bool]:
    """The cheapest layout of `gpus` GPUs of `budget` bytes each that fits, and True; else the smallest, and False.

    Degrees divide `gpus`; FSDP takes the ranks that pipeline and tensor parallelism leave.
    Errors: GradreelError where no layout is legal at all.
    """
    smallest: MemoryPlan | None = None
    hopeless: set[tuple[Parallel, bool]] = set()  # the optimizer's step alone is too large, whatever is recomputed
    for _, parallel, changed in sorted(_layouts(planner, gpus, run), key=lambda item: item[0]):
        if (parallel, changed.offload) in hopeless:
            continue
        try:
            plan = planner.plan(recipe, precision=precision, parallel=parallel, run=changed)
        except GradreelError:
            continue  # a degree that this model does not admit
        if plan.peak_bytes <= budget:
            return plan, True
        if plan.phases[PHASES[2]] > budget:
            hopeless.add((parallel, changed.offload))
        smallest = plan if smallest is None else min(smallest, plan, key=lambda p: p.peak_bytes)
    if smallest is None:
        raise GradreelError(f"no layout of {gpus} GPUs suits {planner.arch.name}; give another number of GPUs")
    return smallest, False


def _layouts(planner: Planner, gpus: int, run: Run) -> Iterator[tuple[float, Parallel, Run]]:
    experts = num_experts(planner.arch.params)
    layers = {info.layer for info in planner.arch.params if info.layer is not None}
    for pipeline in _divisors(gpus, max(1, len(layers))):
        for tensor in (t for t in _TENSOR if (gpus // pipeline) % t == 0):
            left = gpus // pipeline // tensor
            for expert in _divisors(math.gcd(left, *experts) if experts else 1, left):
                parallel = Parallel(fsdp=left, expert=expert, tensor=tensor, pipeline=pipeline)
                degrees = 3 * math.log2(pipeline) + 4 * math.log2(tensor) + math.log2(expert)
                for check, cost in CHECKPOINTING_COST.items():
                    if cost < CHECKPOINTING_COST[run.checkpointing]:
                        continue
                    for offload in (False, True) if not run.offload else (True,):
                        steps = max(run.micro_steps, pipeline)
                        changed = replace(run, checkpointing=check, offload=offload, micro_steps=steps)
                        yield degrees + cost + OFFLOAD_COST * offload, parallel, changed


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def recipes_that_fit(planner: Planner, budget: int, names: list[str], **settings: Any) -> list[str]:
    """Those of the named recipes whose plan fits as everything else is."""
    from toolkit.variants import recipe as find_recipe

    return [name for name in names if planner.plan(find_recipe(name), **settings).peak_bytes <= budget]
