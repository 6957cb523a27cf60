"""A trace as a replay sees it: what can be replayed, each tensor cut to the experts that were recorded throughout.

Legend: E experts, e those recorded in every replayed step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from toolkit.replay._lr import RecordedLr
from traces.errors import GradreelError, NotRecorded
from traces.reader import Trace, open_trace
from traces.views import NOT_RECORDED, ParamInfo, RoutingStep

if TYPE_CHECKING:
    from toolkit.replay._plan import Subject

#: Steps looked at to learn which parameters have a gradient: a parameter is recorded in every step or in none.
_PROBED_STEPS = 2


class Described(Protocol):
    """Anything with a parameter's name and shape, a ParamInfo for instance."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Source:
    """Read access to one trace for replay, compare and selfcheck."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.id = trace.id
        self.steps: tuple[int, ...] = tuple(trace.steps)
        self.streams: tuple[str, ...] = tuple(trace.streams)
        self.infos = {p.name: p for p in trace.header.params if self._has_gradient(p)}

    @classmethod
    def of(cls, trace: Any) -> Source:
        """From a Trace, or from the path of one."""
        return cls(open_trace(trace) if isinstance(trace, str | Path) else trace)

    def _has_gradient(self, info: ParamInfo) -> bool:
        if "gradient" not in self.streams or info.tied_to is not None:
            return False
        probed = self.steps[:_PROBED_STEPS]
        return any(bool((self.trace.presence(info.name, step) != NOT_RECORDED).any()) for step in probed)

    # ------------------------------------------------------------------------------------------------- tensors

    def gradient(self, subject: Subject, step: int) -> Tensor | None:
        """The gradient of the recorded experts in the recorded dtype and the parameter's layout; None as recorded."""
        gradient = self.trace.gradient(subject.info.name, step, _ids(subject))
        return None if gradient is None else _laid_out(gradient, subject.cut)

    def weight(self, subject: Subject, step: int) -> Tensor:
        """The weight before the update of `step`."""
        return _laid_out(self.trace.weight(subject.info.name, step, _ids(subject)), subject.cut)

    def blank(self, subject: Subject) -> Tensor:
        """A zero weight for a parameter whose weight was not recorded."""
        return _laid_out(torch.zeros(subject.cut.shape, dtype=getattr(torch, subject.cut.dtype)), subject.cut)

    def has_weight(self, name: str, step: int) -> bool:
        """Whether the weight before `step` was recorded."""
        return step in self.weight_steps and self.trace.raw("weight", name, step) is not None

    @cached_property
    def weight_steps(self) -> tuple[int, ...]:
        """The steps at which weights of any parameter were recorded."""
        return tuple(self.trace.weight_steps())

    def presence(self, subject: Subject, step: int) -> np.ndarray:
        """Presence codes, uint8 [e] (0-d without an expert axis)."""
        codes = self.trace.presence(subject.info.name, step)
        return codes if subject.experts is None else codes[subject.experts]

    def experts(self, name: str, steps: Sequence[int]) -> np.ndarray | None:
        """Ids of the experts recorded in every one of `steps`, int64; None where all were."""
        common: np.ndarray | None = None
        for step in steps:
            ids = self.trace.experts(name, step)
            if ids is not None:
                common = np.asarray(ids) if common is None else np.intersect1d(common, ids)
        if common is not None and not len(common):
            raise NotRecorded(
                f"no expert of {name} was recorded in every step from {steps[0]} to {steps[-1]}; replay fewer steps, "
                "or record the same experts throughout"
            )
        return common

    # ------------------------------------------------------------------------------------------ routing, rates

    @property
    def routed_layers(self) -> list[int]:
        """The MoE layers whose routing may have been recorded."""
        return [layer.layer for layer in self.trace.layers] if "routing" in self.streams else []

    def routing(self, layer: int) -> Iterator[RoutingStep]:
        """What a layer executed, in step order."""
        return self.trace.routing_steps(layer)

    def probes(self, steps: Sequence[int]) -> Iterator[RoutingStep]:
        """What each layer did with the probe batch, layer by layer in step order; all of them where all steps are
        replayed, else those from the first to the last of `steps`."""
        if "probe" not in self.streams:
            return
        whole = tuple(steps) == self.steps
        for layer in self.trace.layers:
            for step in self.trace.probe_steps():
                if whole or steps[0] <= step <= steps[-1]:
                    probe = self.trace.probe_step(step, layer.layer)
                    if probe is not None:
                        yield probe

    def micro_norms(self, subject: Subject, step: int) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Squared norms and tokens of each micro-step, float64 [M, E]; None where they were not recorded."""
        found = self.trace.micro_norms(subject.info.name, step) if "micro_norms" in self.streams else None
        return (None, None) if found is None else found

    @cached_property
    def recorded_lr(self) -> RecordedLr:
        """The recorded learning rates."""
        groups = self.groups
        group_of = {name: number for number, group in enumerate(groups) for name in group.get("params", ())}
        return RecordedLr(self.trace.lr, tuple(self.trace.all_steps), group_of)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The recorded optimizer's groups; empty where the header does not tell."""
        groups = self.trace.header.run.get("groups")
        return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []

    @cached_property
    def skipped(self) -> frozenset[int]:
        """Steps in which the recorded optimizer took no step, a step with infinite gradients for instance."""
        return frozenset(self.trace.scalars().filter("skipped")["step"].to_list())

    def skipped_rows(self, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
        """One row for each skipped step between the first and the last replayed one."""
        for step in sorted(self.skipped):
            if steps[0] <= step <= steps[-1]:
                yield {"step": step, "metric": "skipped_step", "value": 1.0, "flag": "skipped", "unit": "1"}

    @property
    def initial_state(self) -> tuple[str, ...]:
        """The slots of optimizer state that were in place when the recording began."""
        return tuple(stream.removeprefix("state.") for stream in self.streams if stream.startswith("state."))

    def describe(self, steps: Sequence[int]) -> dict[str, Any]:
        """The trace in words, for provenance."""
        run = self.trace.header.run
        return {
            "id": self.id,
            "path": str(self.trace.path),
            "finished": self.trace.finished,
            "steps": [steps[0], steps[-1]],
            "recorded_steps": len(steps),
            "run": {key: value for key, value in run.items() if key != "groups"},
        }


def check_parameters(recorded: Iterable[Described], expected: Iterable[Described]) -> None:
    """Refuse to take one parameter table for another: GradreelError with the names that differ.

    `recorded` is a trace's table (`trace.header.params`), `expected` the one it is to be used with, in order; objects
    with `name` and `shape`.
    """
    mine, theirs = list(recorded), list(expected)
    names, wanted = [p.name for p in mine], [p.name for p in theirs]
    missing, surplus = [n for n in wanted if n not in set(names)], [n for n in names if n not in set(wanted)]
    if missing or surplus:
        parts = [f"{what} {_some(which)}" for what, which in (("lacks", missing), ("has also", surplus)) if which]
        raise GradreelError(
            f"the trace's parameters are other ones: it {' and '.join(parts)}; record this model, or rename"
        )
    shapes = {p.name: tuple(p.shape) for p in mine}
    other = [
        f"{p.name} {shapes[p.name]} instead of {tuple(p.shape)}" for p in theirs if shapes[p.name] != tuple(p.shape)
    ]
    if other:
        raise GradreelError(f"the trace's parameters have other shapes: {_some(other)}; record this model")
    moved = [f"{a} where {b} is expected" for a, b in zip(names, wanted, strict=True) if a != b]
    if moved:
        raise GradreelError(f"the trace's parameters come in another order: {_some(moved)}; use the order of the trace")


def _some(items: Sequence[str], shown: int = 4) -> str:
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more


def _ids(subject: Subject) -> list[int] | None:
    return None if subject.experts is None else [int(i) for i in subject.experts]


def _laid_out(tensor: Tensor, info: ParamInfo) -> Tensor:
    """The tensor in the memory order of the parameter; a file holds row-major order, and arithmetic follows memory."""
    if info.strides is None or tuple(tensor.stride()) == tuple(info.strides):
        return tensor
    order = sorted(range(tensor.dim()), key=lambda axis: -info.strides[axis])  # type: ignore[index]
    out = tensor.permute(order).contiguous().permute([order.index(axis) for axis in range(tensor.dim())])
    return out if tuple(out.stride()) == tuple(info.strides) else tensor
