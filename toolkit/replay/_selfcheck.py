"""Does a replay reproduce the run it was recorded from, bit for bit?

Only then are the numbers of a replay those of an optimizer, and not of a look-alike.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from toolkit.recipes import Recipe
from toolkit.replay._engine import read_tokens
from toolkit.replay._plan import Plan, Subject, bursts_of, make_plan
from toolkit.replay._source import Source
from toolkit.replay._trained_by import TORCH_OPTIMIZERS, optimizer_of, state_names, trained_by
from toolkit.replay._walk import Track, Walk, Want
from traces.console import CheckFailed, progress_bar

#: Switches of torch's optimizers that change the arithmetic, or the rule, of what is replayed.
_OTHER_ARITHMETIC = ("fused", "capturable", "differentiable", "amsgrad", "maximize", "tensor_lr")


@dataclass(frozen=True)
class SelfCheck:
    """`ok`: every compared weight is bit-equal. `comparable`: that could be expected (else `message` says why not).

    `step` and `param` name the first difference: the weight before `step`. `max_difference` is the largest absolute one
    over all compared weights (None where nothing could be compared), `compared` the number of tensors.
    """

    ok: bool
    comparable: bool
    message: str
    max_difference: float | None = None
    step: int | None = None
    param: str | None = None
    compared: int = 0

    def require(self) -> None:
        """Raise CheckFailed where bit-equality could be expected and is not there."""
        if self.comparable and not self.ok:
            raise CheckFailed(self.message)


@dataclass
class _Found:
    """What comparing weights has shown so far."""

    order: dict[str, int]
    compared: int = 0
    largest: float = 0.0
    largest_at: tuple[str, int] | None = None
    first: tuple[int, int, str] | None = None
    differing: set[str] = field(default_factory=set)

    def add(self, name: str, step: int, mine: Tensor, recorded: Tensor) -> None:
        self.compared += 1
        if _same_bits(mine, recorded):
            return
        self.differing.add(name)
        # Equal infinities are no difference, and their gap is not inf - inf.
        gaps = torch.where(mine == recorded, 0.0, (mine.double() - recorded.double()).abs())
        gap = float(gaps.nan_to_num(nan=math.inf).max())
        if gap > self.largest or self.largest_at is None:
            self.largest, self.largest_at = gap, (name, step)
        here = (step, self.order[name], name)
        self.first = here if self.first is None else min(self.first, here)


def selfcheck(
    trace: Any, recipe: str | Recipe | None = None, *, progress: bool | None = None, seed: int | None = None
) -> SelfCheck:
    """Replay the recipe that really trained `trace` and compare with the weights it recorded.

    Gradients are the recorded (clipped) ones, rates the recorded ones per group. `recipe` None takes the optimizer and
    its hyper-parameters from the header, and so does the bare name of that optimizer; a name with switches or a Recipe
    is used as it is. Runs with the recorded number of threads. Raises GradreelError where the header does not say which
    recipe it was.
    """
    source = Source.of(trace)
    rules = trained_by(source, recipe)
    reasons = [*why_not_comparable(source)]
    dues = [due for due in due_by_burst(source) if due]
    if not source.steps or not source.weight_steps:
        return SelfCheck(False, False, _not_comparable(["no weight was recorded at the first recorded step"]))
    if not dues:
        last = source.steps[-1]
        where = f"no weight after step {source.steps[0]} can be reached without a gap (recorded steps end at {last})"
        return SelfCheck(False, False, _not_comparable([where]))
    found = _Found({name: number for number, name in enumerate(source.infos)})
    total = sum(len(names) * len(due.steps) for rule, names in rules for due in dues_of(rule, dues, source))
    with recorded_threads(source), progress_bar("selfcheck", total, "tensors", wanted=progress) as advance:
        for rule, names in rules:
            for due in dues_of(rule, dues, source):
                plan = make_plan(
                    source, {"recorded": rule}, lr="recorded", gaps="ignore", params=names, steps=due.steps
                )
                tokens = read_tokens(source, plan)
                for group in plan.groups:
                    chosen = seed if seed is not None else int(source.trace.header.run.get("seed") or 0)
                    walk = Walk(source, plan, group, tokens, want=Want(False, False, False), seed=chosen)
                    reasons += _begin(source, plan, walk)
                    for moment in walk:
                        (track,) = walk.tracks[moment.subject.info.name]
                        _compare(source, found, moment.subject, track, due.after.get(moment.step, ()))
                        advance(1)
    return _verdict(source, found, list(dict.fromkeys(reasons)), rules, dues)


@dataclass(frozen=True)
class Due:
    """Which steps must be replayed, and after which of them which recorded weights can be compared."""

    steps: tuple[int, ...]
    after: dict[int, tuple[int, ...]]

    def __bool__(self) -> bool:
        return bool(self.after)


def due_by_burst(source: Source) -> list[Due]:
    """For each burst whose first weight was recorded, what can be reached from there; the first burst first."""
    bursts = bursts_of(source.steps, source.skipped)
    return [due_weights(source, first) for first, _ in bursts if first in source.weight_steps]


def dues_of(rule: Recipe, dues: Sequence[Due], source: Source) -> list[Due]:
    """A recipe with state can only be followed from the first recorded step, where its state is known."""
    return [due for due in dues if due.steps[0] == source.steps[0] or not rule.is_stateful()]


def due_weights(source: Source, first: int | None = None) -> Due:
    """Recorded weights that the steps from `first` (default: the first recorded one) reach without a gap."""
    if not source.steps:
        return Due((), {})
    known, first = set(source.steps), source.steps[0] if first is None else first
    after: dict[int, tuple[int, ...]] = {}
    reached, last = first, None
    for weight_step in (s for s in source.weight_steps if s > first):
        while reached < weight_step and (reached in known or reached in source.skipped):
            last = reached if reached in known and reached not in source.skipped else last
            reached += 1
        if reached < weight_step:
            break
        if last is not None:
            after[last] = (*after.get(last, ()), weight_step)
    end = max(after, default=first)
    return Due(tuple(s for s in source.steps if first <= s <= end), after)


def why_not_comparable(source: Source) -> Iterator[str]:
    """What in the header, or on this machine, makes bit-equality more than can be expected."""
    run = source.trace.header.run
    for name in _OTHER_ARITHMETIC:
        if any(group.get(name) for group in source.groups) or run.get(name):
            yield f"the optimizer ran with {name}=True"
    device = str(run.get("device", "cpu"))
    if device.split(":")[0] != "cpu":
        yield f"the run was on {device}, this replay on cpu"
    # The vector width of the CPU decides how sums and fused multiply-adds round.
    facts = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    for key, here in facts.items():
        if run.get(key) not in (None, here):
            yield f"{key} was {run[key]}, here it is {here}"
    for name, info in source.infos.items():
        raw = source.trace.raw("gradient", name, source.steps[0])
        if raw is not None and raw.dtype != info.dtype:
            yield f"gradients were stored as {raw.dtype}, parameters are {info.dtype}"
            break
    half = next((info for info in source.infos.values() if info.dtype in ("bfloat16", "float16")), None)
    if half is not None and any(optimizer_of(source, group) in TORCH_OPTIMIZERS for group in source.groups):
        yield f"torch's optimizers compute and keep state in {half.dtype}, recipes in float32"
    if any(source.trace.experts(name, source.steps[0]) is not None for name in source.infos):
        yield "only a subset of experts was recorded"
    scalars = source.trace.scalars()
    if "optimizer" in scalars.columns:
        step, name = scalars.drop_nulls("optimizer").select("step", "optimizer").row(0)
        yield f"{name} took over at step {step}"


@contextmanager
def recorded_threads(source: Source) -> Iterator[None]:
    """Run with the recorded number of threads: sums are split by threads, and rounding follows the split."""
    here = torch.get_num_threads()
    recorded = source.trace.header.run.get("threads")
    if isinstance(recorded, int) and 0 < recorded <= 4096:
        torch.set_num_threads(recorded)
    try:
        yield
    finally:
        torch.set_num_threads(here)


def _begin(source: Source, plan: Plan, walk: Walk) -> Iterator[str]:
    """Put the recorded initial state in place; yield a reason where that cannot be done."""
    if not source.initial_state:
        return
    by_name = {name: group for group in source.groups for name in group.get("params", ())}
    for name, (track,) in walk.tracks.items():
        names = state_names(source, by_name.get(name, {}))
        for slot in source.initial_state:
            raw = source.trace.raw(f"state.{slot}", name, source.steps[0])
            if raw is None:
                continue
            value = source.trace.tensor(f"state.{slot}", name, source.steps[0])
            assert value is not None
            key = names.get(slot, slot)
            own = track.stepper.state.get(key)
            if own is None:
                yield f"the recording began with state {slot!r}, which recipe {track.entrant.recipe.name} does not keep"
                continue
            if value.shape != own.shape and value.numel() == own.numel():
                value = track.stepper.layout.canonical(value)
            if value.shape != own.shape and value.dim():
                yield f"state {slot!r} of {name} has shape {tuple(value.shape)}, the recipe keeps {tuple(own.shape)}"
                continue
            own.copy_(value)


def _compare(source: Source, found: _Found, subject: Subject, track: Track, steps: tuple[int, ...]) -> None:
    for step in steps:
        if source.has_weight(subject.info.name, step):
            found.add(subject.info.name, step, track.weight, source.weight(subject, step))


def _verdict(
    source: Source, found: _Found, reasons: list[str], rules: list[tuple[Recipe, list[str]]], dues: Sequence[Due]
) -> SelfCheck:
    label = ", ".join(dict.fromkeys(rule.name for rule, _ in rules))
    steps = f"steps {source.steps[0]} to {source.steps[-1]}"
    if not found.compared:
        return SelfCheck(False, False, _not_comparable([*reasons, "no later weight was recorded for any parameter"]))
    if found.first is None:
        message = f"bit-exact: {label} reproduces {found.compared} recorded weights over {steps}"
        if len(dues) > 1:
            kept = [rule.name for rule, _ in rules if rule.is_stateful()]
            message += f", {len(dues)} bursts, each from its own weights"
            message += f"; later bursts are not compared for {kept[0]}, which keeps state" if kept else ""
        return SelfCheck(True, True, message, 0.0, compared=found.compared)
    step, _, param = found.first
    where = f"largest difference {found.largest:.3g} in {found.largest_at[0]}" if found.largest_at else ""
    counted = f"{len(found.differing)} of {len(found.order)} parameters"
    if reasons:
        message = f"{_not_comparable(reasons)}; {where} ({counted} differ)"
    else:
        message = (
            f"{label} differs from the recorded run: first in {param}, weight before step {step}; {where} ({counted})"
        )
    return SelfCheck(False, not reasons, message, found.largest, step, param, found.compared)


def _not_comparable(reasons: list[str]) -> str:
    return f"not comparable bit for bit: {'; '.join(reasons)}"


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal to the bit; any NaN equals any other, since its payload follows no rule."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    same = left.contiguous().view(width) == right.contiguous().view(width)
    return bool((same | (left.isnan() & right.isnan())).all())
