"""A memory plan: every byte of a training step on the fullest GPU, by category and role, from shapes alone.

Three phases are compared, in each of which weights, state, pinned gradients, counters and master weights lie there:

1. backward begins: all activations, the loss's workspace, and gradients where earlier micro-steps left some;
2. backward ends: all gradients, where they are added up the largest gradient a second time (what autograd makes before
   it accumulates), what checkpointing recomputes of one block, and under FSDP two gathered blocks of weights and one of
   gradients;
3. the optimizer steps: all gradients, the step's temporaries, and the logits where the loop still holds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from toolkit.memory._account import KINDS, account
from toolkit.memory._activations import Activations, activations
from toolkit.memory._ranks import Held, check_degrees, first_of, held_by_rank, kinds_of, stages_of
from toolkit.memory._settings import Parallel, Precision, Run
from toolkit.memory._shapes import ITEMSIZE, Architecture, architecture
from toolkit.memory._step_peak import step_peak
from toolkit.memory._units import GB, GIB
from toolkit.recipes import Recipe
from traces.errors import GradreelError
from traces.views import ROLES, ParamInfo

if TYPE_CHECKING:
    import polars as pl

#: Tokens of a sequence where nothing is said.
USUAL_SEQUENCE = 2048
#: Categories in the order they are shown, with what each one is. All in bytes.
CATEGORIES = {
    "weight_bytes": "weights, with buffers that are no parameters",
    "gradient_bytes": "gradients that the optimizer step meets",
    "state_bytes": "optimizer state, without step counters",
    "pinned_gradient_bytes": "gradient buffers that must survive between steps (hidden momentum)",
    "step_counter_bytes": "step counters, which published tables leave out",
    "master_weight_bytes": "a second copy of the weights, which the optimizer steps",
    "activation_bytes": "what forward keeps for backward",
    "step_temporary_bytes": "temporaries at the peak of one optimizer step",
    "workspace_bytes": "short-lived buffers of forward and backward: loss, recomputation, gathered weights",
}
#: Categories that lie there in every phase.
FIXED = ("weight_bytes", "state_bytes", "pinned_gradient_bytes", "step_counter_bytes", "master_weight_bytes")
PINNED = ("pinned_gradient_bytes",)
PHASES = ("backward begins", "backward ends", "optimizer step")


@dataclass(frozen=True)
class MemoryPlan:
    """What one recipe needs on the fullest GPU of a run.

    `rows` maps (category, role or None) to bytes; `phases` maps each phase to its total, of which `peak_bytes` is the
    largest. `host_bytes`: what an offloaded optimizer keeps on the host instead. `notes`: one line each on what was
    assumed.
    """

    model: str
    recipe: str
    parameters: int
    rows: dict[tuple[str, str | None], int]
    phases: dict[str, int]
    precision: Precision
    parallel: Parallel
    run: Run
    host_bytes: int = 0
    notes: tuple[str, ...] = ()

    def bytes_of(self, category: str, role: str | None = None) -> int:
        """Bytes of a category, of one role or of all."""
        return sum(b for (c, r), b in self.rows.items() if c == category and role in (None, r))

    @property
    def roles(self) -> list[str]:
        """The roles that hold anything, in the order of `traces.views.ROLES`."""
        return [role for role in ROLES if any(r == role for _, r in self.rows)]

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state, without step counters."""
        return self.bytes_of("state_bytes")

    @property
    def pinned_gradient_bytes(self) -> int:
        """Bytes of gradient buffers that must survive between steps."""
        return self.bytes_of("pinned_gradient_bytes")

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak lies."""
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak, without what the CUDA context and the allocator add."""
        return self.phases[self.peak_phase]

    @property
    def frame(self) -> pl.DataFrame:
        """The plan as a Frame: a row per category and role; `peak_bytes`, `host_bytes` and `parameters` once."""
        from toolkit.frame import FrameWriter

        constants = {"run": self.model, "recipe": self.recipe, "unit": "B"}
        with FrameWriter(constants=constants) as writer:
            writer.write(
                {"role": role, "metric": category, "value": float(count)}
                for (category, role), count in self.rows.items()
            )
            whole = {"peak_bytes": self.peak_bytes, "host_bytes": self.host_bytes}
            writer.write({"metric": metric, "value": float(count)} for metric, count in whole.items())
            writer.write([{"metric": "parameters", "value": float(self.parameters), "unit": "1"}])
            return writer.close().collect()

    def fits(self, gib: float) -> bool:
        """Whether the peak is at most `gib` x 2^30 bytes."""
        return self.peak_bytes <= gib * GIB

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": self.model,
            "recipe": self.recipe,
            "parameters": self.parameters,
            "bytes": {category: self.bytes_of(category) for category in CATEGORIES},
            "bytes_by_role": [{"category": c, "role": r, "bytes": b} for (c, r), b in self.rows.items()],
            "phases": dict(self.phases),
            "peak_phase": self.peak_phase,
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.host_bytes,
            **{part: _plain(getattr(self, part)) for part in ("precision", "parallel", "run")},
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """The plan as plain text: one line per category, in bytes, GiB and GB."""
        shown = [(name.removesuffix("_bytes").replace("_", " "), self.bytes_of(name)) for name in CATEGORIES]
        shown += [(f"phase: {phase}", count) for phase, count in self.phases.items()]
        return [f"{name:<24} {count:>22,} B {count / GIB:>10.3f} GiB {count / GB:>10.3f} GB" for name, count in shown]


def plan_memory(
    source: Any,
    recipe: str | Recipe,
    *,
    precision: Precision | None = None,
    parallel: Parallel | None = None,
    run: Run | None = None,
    **settings: Any,
) -> MemoryPlan:
    """What training `source` with `recipe` needs on the fullest GPU, without allocating anything.

    `source`: a module (meta or real), a Hugging Face config (object, dict or path of a config.json), a trace, a list of
    ParamInfo, or a registered name such as "skewadam-6.78b". `settings` are fields of Precision, Parallel and Run
    (`weights="bfloat16"`, `fsdp=8`, `batch=4`, `checkpointing="full"`). State is exact; activations follow the closed
    form of `_activations.py`. Errors: GradreelError for an unknown source, recipe or setting and for degrees that
    contradict each other or the model.
    """
    from toolkit.variants import recipe as find_recipe

    parts: dict[str, Any] = {
        "precision": precision or Precision(),
        "parallel": parallel or Parallel(),
        "run": run or Run(),
    }
    known = {f.name: part for part, holder in parts.items() for f in fields(holder)}
    wrong = next((name for name in settings if name not in known), None)
    if wrong is not None:
        raise GradreelError(f"plan_memory has no setting {wrong!r}; allowed: {', '.join(sorted(known))}")
    for part in parts:  # all of one part at once, since they are checked together
        parts[part] = replace(parts[part], **{name: value for name, value in settings.items() if known[name] == part})
    arch = architecture(source)
    if run is None and "sequence" not in settings:
        parts["run"] = replace(parts["run"], sequence=usual_sequence(arch))
    return Planner(arch).plan(recipe if isinstance(recipe, Recipe) else find_recipe(recipe), **parts)


def usual_sequence(arch: Architecture) -> int:
    """2048 tokens, or as many as the model has positions for."""
    return min(USUAL_SEQUENCE, first_of(arch.config, "max_position_embeddings", "max_positions") or USUAL_SEQUENCE)


class Planner:
    """Plans of one model; what many plans share is computed once, so that a search over layouts is quick."""

    def __init__(self, arch: Architecture) -> None:
        self.arch = arch
        self._kept: dict[Any, Any] = {}
        self._recipes: dict[int, Recipe] = {}  # held, so that no other recipe can get the id of one

    def plan(self, recipe: Recipe, *, precision: Precision, parallel: Parallel, run: Run) -> MemoryPlan:
        """The plan of the fullest pipeline stage."""
        self._recipes[id(recipe)] = recipe
        cast = precision.weights
        arch = self._once(("cast", cast), lambda: self.arch.with_dtype(cast))
        self._once(("checked", parallel), lambda: check_degrees(arch, parallel))
        stages = self._once(("stages", cast, parallel.pipeline), lambda: stages_of(arch, parallel.pipeline))
        plans = []
        for index, params in enumerate(stages):
            cut = (cast, parallel.pipeline, index)
            kinds = self._once(
                ("kinds", *cut, parallel.expert),
                lambda params=params: kinds_of(params, parallel, arch.frozen),  # type: ignore[misc]
            )
            held, blocks = self._once(
                ("held", id(recipe), *cut, parallel),
                lambda kinds=kinds: held_by_rank(kinds, recipe, parallel, arch.config, arch.frozen),  # type: ignore[misc]
            )
            flight = min(run.micro_steps, parallel.pipeline - index)
            last = index == len(stages) - 1
            kept = self._once(
                ("kept", *cut, parallel.tensor, flight, run.batch, run.sequence, run.checkpointing, run.attention),
                lambda params=params, flight=flight, last=last: activations(  # type: ignore[misc]
                    arch, params, run, tensor=parallel.tensor, in_flight=flight, last_stage=last
                ),
            )
            plans.append(self._stage(arch, recipe, held, blocks, kept, precision, parallel, run))
        fullest = max(range(len(plans)), key=lambda i: plans[i].peak_bytes)
        notes = list(plans[fullest].notes)
        if all(info.role != "routed_expert" for info in arch.params):
            notes.append(f"{arch.name} has no routed experts: this is the plan of a dense model")
        if len(plans) > 1:
            notes.append(f"the fullest of {len(plans)} pipeline stages is number {fullest}")
        return replace(plans[fullest], notes=tuple(notes))

    def _once(self, key: Any, compute: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    def _stage(
        self,
        arch: Architecture,
        recipe: Recipe,
        held: list[Held],
        blocks: dict[int | None, Counter[str]],
        kept: Activations,
        precision: Precision,
        parallel: Parallel,
        run: Run,
    ) -> MemoryPlan:
        rows: dict[tuple[str, str | None], int] = {("weight_bytes", "other"): arch.buffer_bytes}
        attached = run.hidden_momentum == "attached" and parallel.world == 1 and precision.accumulation is None
        largest_gradient = hidden = 0

        def add(category: str, role: str | None, count: int) -> None:
            if count:
                rows[category, role] = rows.get((category, role), 0) + count

        for each in held:
            info, n = each.stepped, each.count
            size = ITEMSIZE.get(info.dtype, 4)
            add("weight_bytes", info.role, n * each.stored * size)
            if each.frozen:
                continue
            fresh = ITEMSIZE[precision.gradients or info.dtype]
            largest_gradient = max(largest_gradient, each.unsharded * fresh)
            if attached and _is_hidden(recipe, info):
                hidden += n
            else:
                summed = ITEMSIZE[precision.accumulation] if precision.accumulation else fresh
                add("gradient_bytes", info.role, n * each.stored * summed)
            if precision.master is not None:
                add("master_weight_bytes", info.role, n * each.stored * ITEMSIZE[precision.master])
            for category, count in self._state(recipe, info, precision.master).items():
                add(category, info.role, n * count)
        on_host = 0
        moved = ("state_bytes", "master_weight_bytes", "step_counter_bytes", *(() if attached else PINNED))
        staged = 0
        if run.offload:
            on_host = sum(count for (category, _), count in rows.items() if category in moved)
            rows = {key: count for key, count in rows.items() if key[0] not in moved}
            staged = max((self._one_staged(recipe, each, precision) for each in held if not each.frozen), default=0)
        add("activation_bytes", None, kept.kept)
        add("step_temporary_bytes", None, self._temporaries(recipe, held, precision, run) + staged)
        fixed = sum(count for (category, _), count in rows.items() if category in FIXED)
        gradients = sum(count for (category, _), count in rows.items() if category == "gradient_bytes")
        gathered = _gathered_by_fsdp(blocks, precision)
        summed_up = run.micro_steps > 1 or precision.accumulation is not None or hidden
        backward = largest_gradient * bool(summed_up) + kept.recomputed + gathered
        earlier = gradients if run.micro_steps > 1 or precision.accumulation else 0
        phases = {
            PHASES[0]: fixed + earlier + kept.kept + kept.loss + gathered,
            PHASES[1]: fixed + gradients + backward,
            PHASES[2]: fixed + gradients + rows.get(("step_temporary_bytes", None), 0) + kept.logits * run.keep_logits,
        }
        add("workspace_bytes", None, max(kept.loss + gathered, backward))
        return MemoryPlan(
            self.arch.name,
            recipe.name,
            self.arch.parameters,
            rows,
            phases,
            precision,
            parallel,
            run,
            on_host,
            _notes(recipe, held, hidden, run, parallel),
        )

    def _state(self, recipe: Recipe, info: ParamInfo, master: str | None) -> dict[str, int]:
        def count() -> dict[str, int]:
            (row,) = account(recipe, [info if master is None else replace(info, dtype=master)])
            return {kind: row[kind] for kind in KINDS}

        layout = (info.role, info.shape, info.dtype, info.expert_axis, info.matrix_axes, info.expert is None)
        return self._once(("state", id(recipe), layout, master), count)

    def _one_staged(self, recipe: Recipe, each: Held, precision: Precision) -> int:
        found = self._state(recipe, each.stepped, precision.master)["state_bytes"]
        return found + (each.stored * ITEMSIZE[precision.master] if precision.master else 0)

    def _temporaries(self, recipe: Recipe, held: list[Held], precision: Precision, run: Run) -> int:
        params = [replace(h.stepped, dtype=precision.master or h.stepped.dtype) for h in held if not h.frozen]
        if not params:
            return 0
        peak = step_peak(recipe, params, original=run.step == "original").bytes
        whole = max((h.stepped.numel * 2 * ITEMSIZE[h.stepped.dtype] for h in held if h.gathered), default=0)
        return peak + whole


def _is_hidden(recipe: Recipe, info: ParamInfo) -> bool:
    """Whether `toolkit.optim` may let backward add this parameter's gradient onto its momentum."""
    chain = recipe.chain_for(info)
    return chain.stages[0].name == "hidden_ema" and any(slot.home == "grad_buffer" for _, slot in chain.slots())


def _gathered_by_fsdp(blocks: dict[int | None, Counter[str]], precision: Precision) -> int:
    """Two blocks of gathered weights (one is fetched ahead) and one block of gradients before they are scattered."""
    weights = [sum(ITEMSIZE[d] * n for d, n in block.items()) for block in blocks.values()]
    gradients = [sum(ITEMSIZE[precision.gradients or d] * n for d, n in block.items()) for block in blocks.values()]
    return 2 * max(weights, default=0) + max(gradients, default=0)


def _notes(recipe: Recipe, held: list[Held], hidden: int, run: Run, parallel: Parallel) -> tuple[str, ...]:
    notes = []
    if hidden:
        notes.append(
            f"the gradients of {hidden} routed-expert parameters are added onto their momentum (pinned), so they "
            "are no line of their own"
        )
    whole = sum(each.count for each in held if each.gathered)
    if whole:
        notes.append(
            f"{whole} parameters need whole matrices in {recipe.name}: FSDP gathers them to step, and their state "
            "is on every rank"
        )
    if parallel.expert > 1 or run.micro_steps > 1:
        notes.append("loads of experts are taken as balanced")
    return tuple(notes)


def _plain(settings: Any) -> dict[str, Any]:
    return {f.name: getattr(settings, f.name) for f in fields(settings)}
