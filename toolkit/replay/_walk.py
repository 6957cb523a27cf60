"""The pass over a trace: each gradient is read once and handed to every recipe.

Legend: E experts of a parameter, e those recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from toolkit.recipes import Stepper
from toolkit.replay._lr import rate_at
from toolkit.replay._plan import Entrant, Plan, Subject
from toolkit.replay._source import Source


@dataclass(frozen=True, slots=True)
class Want:
    """Which tensors the reader of the pass needs; the others are not made."""

    update: bool = True
    delta: bool = True
    before: bool = True


@dataclass(slots=True)
class Outcome:
    """What one recipe did in one step. Tensors are lent until the next step; None where not wanted or no gradient.

    `update` is the direction before lr, `lr` the rate with the chain's own scale in it, `before` and `after` the weight
    around the step.
    """

    track: Track
    lr: float
    update: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None
    delta: Tensor | None = None


@dataclass(slots=True)
class Moment:
    """One step of one parameter: the recorded side once, the outcome of each recipe still alive."""

    subject: Subject
    step: int
    gradient: Tensor | None
    presence: np.ndarray | None
    tokens: np.ndarray | None
    initial: Tensor | None
    outcomes: list[Outcome] = field(default_factory=list)


class Track:
    """One recipe on one parameter: its weight, its state, its cost, and when it stopped being finite."""

    def __init__(self, entrant: Entrant, subject: Subject, start: Tensor, seed: int, is_reference: bool) -> None:
        self.entrant, self.subject, self.is_reference = entrant, subject, is_reference
        self.weight = start.clone()
        self.before = torch.empty_like(self.weight)
        self.seed = seed
        self.lr_scale = entrant.recipe.chain_for(subject.cut).lr_scale
        self.step_ms: float | None = None
        self.steps_taken = 0
        self.alive = True
        self.broken: np.ndarray = np.zeros(_slices(subject), dtype=bool)
        self.diverged: list[tuple[int, int | None]] = []
        self.restart()

    def restart(self) -> None:
        """Begin with fresh optimizer state; the weight stays where it is."""
        device = self.weight.device
        self.stepper = Stepper(self.entrant.recipe, self.subject.cut, device=device, seed=self.seed)

    def advance(self, moment: Moment, lr: float, want: Want, reference: Outcome | None) -> Outcome:
        """Take one step. With `reference`, scaled so that lr x update has the RMS of the reference's."""
        if want.before or want.delta:
            self.before.copy_(self.weight)
        began = time.perf_counter()
        if reference is not None:
            update, lr = self._matched(moment, reference)
        else:
            update = self._step(self.weight, moment, lr, want.update)
            lr *= self.lr_scale
        spent_ms = 1e3 * (time.perf_counter() - began)
        # The first step compiles kernels and fills caches, which no later one does: its time is not told.
        self.step_ms = spent_ms if self.steps_taken else None
        self.steps_taken += 1
        self._watch(moment.step)
        return Outcome(
            self,
            lr,
            update if want.update else None,
            self.before if want.before else None,
            self.weight,
            self.weight - self.before if want.delta else None,
        )

    def _step(self, weight: Tensor, moment: Moment, lr: float, want_update: bool) -> Tensor | None:
        assert moment.gradient is not None
        return self.stepper.step(
            weight,
            moment.gradient,
            lr=lr,
            presence=moment.presence,
            tokens_per_expert=moment.tokens,
            want_update=want_update,
        )

    def _matched(self, moment: Moment, reference: Outcome) -> tuple[Tensor | None, float]:
        """Try the step to learn the update's RMS, undo it, and take it at the rate that matches the reference.

        Taking it twice keeps every rule exact (decay, stochastic rounding); scaling the new weight would not.
        """
        kept = {key: value.clone() for key, value in self.stepper.state.items()}
        trial = self._step(self.weight.clone(), moment, reference.lr, True)
        own, wanted = rms(trial), rms(reference.update)
        scale = wanted / own if own > 0 and np.isfinite(wanted / own) else 1.0
        for key, value in kept.items():
            self.stepper.state[key].copy_(value)
        self._step(self.weight, moment, reference.lr * scale / self.lr_scale if self.lr_scale else 0.0, False)
        return (None if trial is None else trial * scale), reference.lr

    def _watch(self, step: int) -> None:
        """Note the first step at which the weight of an expert, or of the whole parameter, is not finite."""
        if bool(torch.isfinite(self.weight.sum())):
            return
        finite = torch.isfinite(_by_expert(self.weight, self.subject)).all(dim=1).cpu().numpy()
        fresh = np.flatnonzero(~finite & ~self.broken)
        self.broken |= ~finite
        stacked = self.subject.info.expert_axis is not None
        ids = self.subject.experts
        for slot in fresh:
            expert = int(slot if ids is None else ids[slot]) if stacked else self.subject.info.expert
            self.diverged.append((step, expert))
        self.alive = not bool(self.broken.all())


class Walk:
    """One group of parameters streamed through all recipes, in step order, in the trace's order within a step.

    `tokens` maps (layer, step) to the counts [E]. The first entrant is the reference that `match` refers to.
    `tracks` holds, by parameter, one track per entrant.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        group: Sequence[Subject],
        tokens: Mapping[tuple[int, int], np.ndarray],
        *,
        want: Want,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.source, self.plan, self.group, self.tokens = source, plan, group, tokens
        self.want = replace(want, update=True) if plan.match else want
        self.device = device
        self.tracks: dict[str, list[Track]] = {}
        self.initial: dict[str, Tensor | None] = {}
        for subject in group:
            name = subject.info.name
            start = source.weight(subject, subject.steps[0]).to(device) if subject.has_weight else None
            begin = source.blank(subject).to(device) if start is None else start
            self.initial[name] = start
            self.tracks[name] = [Track(e, subject, begin, seed, e is plan.entrants[0]) for e in plan.entrants]

    def __iter__(self) -> Iterator[Moment]:
        for step in self.plan.steps:
            if step in self.source.skipped:
                continue
            for subject in self.group:
                if step in self.plan.restarts:
                    for track in self.tracks[subject.info.name]:
                        track.restart()
                yield self._moment(subject, step)

    def _moment(self, subject: Subject, step: int) -> Moment:
        name = subject.info.name
        gradient = self.source.gradient(subject, step)
        moment = Moment(
            subject,
            step,
            None if gradient is None else gradient.to(self.device),
            self.source.presence(subject, step),
            _cut_tokens(subject, self.tokens, step),
            self.initial[name],
        )
        reference: Outcome | None = None
        for track in self.tracks[name]:
            if not track.alive:
                continue
            lr = rate_at(track.entrant.lr, self.source.recorded_lr, step, name)
            if gradient is None:
                # torch skips a parameter whose .grad is None: nothing decays, nothing moves, no step is counted.
                moment.outcomes.append(Outcome(track, lr * track.lr_scale, after=track.weight))
                continue
            outcome = track.advance(moment, lr, self.want, reference if self.plan.match else None)
            if track.is_reference:
                reference = outcome
            moment.outcomes.append(outcome)
        return moment


def _cut_tokens(subject: Subject, tokens: Mapping[tuple[int, int], np.ndarray], step: int) -> np.ndarray | None:
    """Counts for the recorded experts of the parameter's layer; None where routing was not recorded."""
    info = subject.info
    if info.layer is None or (info.expert_axis is None and info.expert is None):
        return None
    counts = tokens.get((info.layer, step))
    if counts is None:
        return None
    if info.expert_axis is None:
        return counts[info.expert : info.expert + 1]  # type: ignore[operator]
    return counts[: info.num_experts] if subject.experts is None else counts[subject.experts]


def rms(tensor: Tensor | None) -> float:
    """Root mean square over all elements, in float64; 0 for an empty or missing tensor."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    return float(tensor.detach().to(torch.float64).square().mean().sqrt())


def _slices(subject: Subject) -> int:
    axis = subject.cut.expert_axis
    return 1 if axis is None else subject.cut.shape[axis]


def _by_expert(tensor: Tensor, subject: Subject) -> Tensor:
    """The tensor as [e, L], one row per recorded expert (one row without an expert axis)."""
    axis = subject.cut.expert_axis
    if axis is None:
        return tensor.reshape(1, -1)
    return tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)
