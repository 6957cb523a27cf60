"""What a replay will do, settled and checked before the first tensor is read.

Legend: R recipes, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from toolkit.recipes import Recipe
from toolkit.replay._lr import LrRule, rules_for
from toolkit.replay._source import Source
from toolkit.stages import Stage
from toolkit.variants import recipe as make_recipe
from traces.errors import GradreelError, NotRecorded, unknown
from traces.record_at import parse_bytes
from traces.views import ParamInfo

Gaps = Literal["bursts", "ignore"]
GAPS = ("bursts", "ignore")
MATCHES = ("update_rms",)
#: Bytes that one group of parameters may take: weights, state, buffers and the metrics' history of all recipes.
MEMORY_BYTES = 1 << 30
_FLOAT_BYTES = 4
History = tuple[int, int]


@dataclass(frozen=True)
class Entrant:
    """One recipe of a replay under the label its rows carry, with its rule for the learning rate."""

    label: str
    recipe: Recipe
    lr: LrRule


@dataclass(frozen=True)
class Subject:
    """One parameter as replayed: `info` as in the header, `cut` the same reduced to the recorded experts [e]."""

    info: ParamInfo
    cut: ParamInfo
    steps: tuple[int, ...]
    experts: np.ndarray | None
    has_weight: bool


@dataclass(frozen=True)
class Plan:
    """Entrants, parameters in groups that fit the memory budget, and the runs of consecutive steps."""

    entrants: tuple[Entrant, ...]
    groups: tuple[tuple[Subject, ...], ...]
    steps: tuple[int, ...]
    bursts: tuple[tuple[int, int], ...]
    gaps: Gaps | None
    match: str | None
    notes: tuple[str, ...]

    def regrouped(self, memory_bytes: int | str, history: History) -> Plan:
        """The same plan with groups that also leave room for the metrics' history."""
        size = parse_bytes(memory_bytes)
        return replace(self, groups=group_by_memory(tuple(self.subjects), self.entrants, size, history))

    @property
    def subjects(self) -> Iterator[Subject]:
        """Every parameter, group by group."""
        return (subject for group in self.groups for subject in group)

    @property
    def restarts(self) -> frozenset[int]:
        """The steps before which every recipe's state starts anew, other than the first."""
        return frozenset(first for first, _ in self.bursts[1:]) if self.gaps == "bursts" else frozenset()

    @property
    def lacks_weight(self) -> tuple[str, ...]:
        """Parameters without a recorded weight at the first replayed step."""
        return tuple(s.info.name for s in self.subjects if not s.has_weight)


def entrants_of(recipes: Any, lr: Any, backend: str | None) -> tuple[Entrant, ...]:
    """Recipes by name, object, list or {label: either}, each under a label of its own."""
    if isinstance(recipes, (str, Recipe)):
        recipes = [recipes]
    pairs: list[tuple[str | None, Any]]
    pairs = list(recipes.items()) if isinstance(recipes, Mapping) else [(None, each) for each in recipes]
    if not pairs:
        raise GradreelError("no recipe to replay; name at least one, 'adamw' for instance")
    built: dict[str, Recipe] = {}
    for label, given in pairs:
        made = make_recipe(given)
        name = label or (given if isinstance(given, str) else made.name)
        if name in built:
            raise GradreelError(f"recipe {name!r} is given twice; give labels as {{'first': ..., 'second': ...}}")
        built[name] = with_backend(made, backend)
    rules = rules_for(list(built), lr)
    return tuple(Entrant(label, made, rules.get(label, made.lr)) for label, made in built.items())


def with_backend(made: Recipe, backend: str | None) -> Recipe:
    """The recipe with every stage that has a `backend` switch set to the one named."""
    if backend is None:
        return made
    from toolkit.kernels import _dispatch

    if backend not in _dispatch.BACKENDS:
        raise unknown("backend", backend, _dispatch.BACKENDS)
    return made.map_chains(lambda _, chain: replace(chain, stages=_stages_with_backend(chain.stages, backend)))


def _stages_with_backend(stages: tuple[Stage, ...], backend: str) -> tuple[Stage, ...]:
    changed = []
    for stage in stages:
        if "backend" in stage.options:
            stage = stage.with_options(backend=backend)
        elif "inner" in stage.options:
            stage = stage.with_options(inner=_stages_with_backend(stage.options["inner"], backend))
        changed.append(stage)
    return tuple(changed)


def make_plan(
    source: Source,
    recipes: Any,
    *,
    lr: Any = None,
    backend: str | None = None,
    match: str | None = None,
    gaps: str | None = None,
    params: Iterable[str] | None = None,
    steps: Any = None,
    memory_bytes: int | str = MEMORY_BYTES,
) -> Plan:
    """Settle everything; raise a GradreelError of one line for whatever cannot be done."""
    if match is not None and match not in MATCHES:
        raise unknown("match", match, MATCHES)
    if gaps is not None and gaps not in GAPS:
        raise unknown("gaps policy", gaps, GAPS)
    entrants = entrants_of(recipes, lr, backend)
    names = choose_params(source, params)
    chosen = choose_steps(source, steps)
    bursts = bursts_of(chosen, source.skipped)
    refuse_gaps(entrants, bursts, gaps)
    for entrant in entrants:
        for name in names:
            entrant.recipe.chain_for(source.infos[name])
    subjects = [subject_of(source, name, chosen) for name in names]
    groups = group_by_memory(subjects, entrants, parse_bytes(memory_bytes))
    return Plan(entrants, groups, chosen, bursts, gaps, match, tuple(_notes(source, subjects, entrants)))  # type: ignore[arg-type]


def choose_params(source: Source, params: Iterable[str] | None) -> list[str]:
    """The parameters to replay: those asked for, else every one with a recorded gradient."""
    if params is None:
        names = list(source.infos)
    else:
        names = list(dict.fromkeys([params] if isinstance(params, str) else params))
        for name in names:
            if name not in source.infos:
                raise unknown("parameter with a recorded gradient", name, source.infos)
    if not names and not source.trace.all_steps:
        raise NotRecorded("the trace holds no sealed step, so there is nothing to replay; record at least one step")
    if not names:
        raise NotRecorded("the trace holds no gradients to replay; record with streams=('gradient', ...)")
    return names


def choose_steps(source: Source, steps: Any) -> tuple[int, ...]:
    """The recorded steps to replay: all, a (first, last) pair, or the ones listed."""
    recorded = source.steps
    if not recorded:
        raise NotRecorded("the trace holds no recorded step")
    if steps is None:
        return recorded
    if isinstance(steps, tuple) and len(steps) == 2:
        first, last = (end if given is None else given for given, end in zip(steps, (0, recorded[-1]), strict=True))
        chosen = tuple(s for s in recorded if first <= s <= last)
    else:
        wanted = {int(s) for s in steps}
        missing = sorted(wanted.difference(recorded))
        if missing:
            raise NotRecorded(f"step {missing[0]} was not recorded; recorded: {recorded[0]} to {recorded[-1]}")
        chosen = tuple(s for s in recorded if s in wanted)
    if not chosen:
        raise NotRecorded(f"no recorded step in {steps}; recorded: {recorded[0]} to {recorded[-1]}")
    return chosen


def check_device(device: str) -> str:
    """`device` if this machine has it; GradreelError otherwise."""
    import torch

    if device == "cpu" or (device.split(":")[0] == "cuda" and torch.cuda.is_available()):
        return device
    have = "cpu, cuda" if torch.cuda.is_available() else "cpu (torch sees no CUDA device)"
    raise GradreelError(f"device is {device!r}; allowed: {have}")


def bursts_of(steps: Sequence[int], skipped: frozenset[int] = frozenset()) -> tuple[tuple[int, int], ...]:
    """Runs (first, last) of consecutive steps; a step in which the optimizer was skipped leaves no gap."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and all(between in skipped for between in range(runs[-1][1] + 1, step)):
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return tuple((first, last) for first, last in runs)


def refuse_gaps(entrants: Sequence[Entrant], bursts: Sequence[tuple[int, int]], gaps: str | None) -> None:
    """A recipe with state cannot know what happened between two recorded steps; say so before it pretends."""
    if len(bursts) < 2 or gaps is not None:
        return
    stateful = [e.label for e in entrants if e.recipe.is_stateful()]
    if stateful:
        raise GradreelError(
            f"recipe {', '.join(stateful)} keeps state, but the recorded steps have {len(bursts) - 1} gaps, the first "
            f"between {bursts[0][1]} and {bursts[1][0]}; give gaps='bursts' (state restarts after each gap) or 'ignore'"
        )


def subject_of(source: Source, name: str, steps: tuple[int, ...]) -> Subject:
    """One parameter, cut to the experts that were recorded in every one of `steps`."""
    info = cut = source.infos[name]
    experts = source.experts(name, steps)
    if experts is not None:
        assert info.expert_axis is not None
        shape = list(info.shape)
        shape[info.expert_axis] = len(experts)
        cut = replace(info, shape=tuple(shape), num_experts=len(experts), strides=None)
    return Subject(info, cut, steps, experts, source.has_weight(name, steps[0]))


def group_by_memory(
    subjects: Sequence[Subject], entrants: Sequence[Entrant], memory_bytes: int, history: History = (0, 0)
) -> tuple[tuple[Subject, ...], ...]:
    """Consecutive parameters whose replay together stays under the budget; a larger one goes alone.

    `history` is how many past tensors the metrics keep, once for the trace and once per recipe.
    """
    groups: list[list[Subject]] = []
    used = 0
    for subject in subjects:
        need = bytes_of(subject.cut, entrants, history)
        if not groups or used + need > memory_bytes:
            groups.append([])
            used = 0
        groups[-1].append(subject)
        used += need
    return tuple(tuple(group) for group in groups)


def bytes_of(info: ParamInfo, entrants: Sequence[Entrant], history: History = (0, 0)) -> int:
    """Bytes that replaying one parameter holds: shared tensors once, the rest per recipe."""
    size = info.numel * _FLOAT_BYTES
    shared = (2 + history[0]) * size
    own = sum(
        (3 + history[1]) * size + sum(_slot_bytes(slot, info) for _, slot in entrant.recipe.chain_for(info).slots())
        for entrant in entrants
    )
    return shared + own


def _slot_bytes(slot: Any, info: ParamInfo) -> int:
    shape = canonical_shape(info)
    return int(np.prod(slot.shape(shape), dtype=np.int64)) * _FLOAT_BYTES


def canonical_shape(info: ParamInfo) -> tuple[int, ...]:
    """The shape stages see: the expert axis first, then other axes, matrix rows and columns last."""
    if info.matrix_axes is None:
        return info.shape
    ends = [axis % len(info.shape) for axis in info.matrix_axes]
    lead = [axis for axis in range(len(info.shape)) if axis not in ends]
    if info.expert_axis is not None:
        first = info.expert_axis % len(info.shape)
        lead = [first, *(axis for axis in lead if axis != first)]
    return tuple(info.shape[axis] for axis in (*lead, *ends))


def _notes(source: Source, subjects: Sequence[Subject], entrants: Sequence[Entrant]) -> Iterator[str]:
    without = [s.info.name for s in subjects if not s.has_weight]
    if without:
        yield (
            f"no weight was recorded at step {subjects[0].steps[0]} for {len(without)} of {len(subjects)} parameters "
            f"({without[0]} first); only metrics of the update are offered for them"
        )
    if any(s.experts is not None for s in subjects):
        yield "a subset of experts was recorded; the replay and its summaries cover those alone"
    scheduled = any(isinstance(e.lr, float | int) for e in entrants)
    if scheduled and any(source.recorded_lr.shape(s.steps[0], s.info.name) is None for s in subjects):
        yield "no learning rate was recorded for some parameters; recipes run at their constant base lr there"
    if source.initial_state and any(e.recipe.is_stateful() for e in entrants):
        yield "the recording began with optimizer state in place; recipes begin with none, so their first steps warm up"
