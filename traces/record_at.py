"""What to record, and when: one frozen value, checked where it is built and kept in the trace's header."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from traces import policy_sizes
from traces._json import clip
from traces.errors import GradreelError
from traces.schema import LayerInfo
from traces.views import ROLES, STREAMS, ParamInfo

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_BUDGET = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_MOST = 1 << 53  # what the header of a trace can hold
WEIGHTS = ("ends", "bursts", "none")
_BACKBONE = tuple(r for r in ROLES if r not in ("router", "router_bias", "routed_expert"))


def parse_bytes(text: str | int) -> int:
    """Bytes of a size such as "10GiB", "500 MB" or 4096; `GradreelError` otherwise."""
    if isinstance(text, int) and not isinstance(text, bool):
        value: float = text
    else:
        match = _BUDGET.fullmatch(text.strip()) if isinstance(text, str) else None
        units = {name.lower(): size for name, size in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise GradreelError(
                f"budget {clip(text)} is not a size; write a number and a unit, such as '10GiB' or '500MB'"
            )
        value = float(match[1]) * units[match[2].lower()]
    if not 1 <= value < 1 << 60:
        raise GradreelError(f"budget {clip(text)} must be at least one byte and below 2^60; write such as '10GiB'")
    return int(value)


def format_bytes(count: float) -> str:
    """A size for people: 1536 gives "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@dataclass(frozen=True, slots=True)
class RecordAt:
    """Which steps, roles, streams and experts to record, in which dtype, and how many bytes at most.

    - `every`: each n-th step, counted from step 1. `bursts=(length, period)`: the first `length` steps of each
      `period`, because temporal measures need neighbours; it excludes `every`.
    - `roles`: roles whose tensors are recorded; "backbone" stands for all but router, router_bias and routed_expert,
      "all" for every role. A router's bias follows its router.
    - `streams`: names of `traces.views.STREAMS`. "statistics" is recorded at every step, of every expert, whatever
      else this policy leaves out. "weight" stores weights at every recorded step.
    - `experts`: "all"; a number n, for a sample of n per layer spread evenly over the load at the first recorded step
      (busiest and idlest included); or a list of ids. `resample=True` draws the sample anew at each burst, which
      follows a load that moves, and leaves experts that were recorded in one burst only.
    - `weights`: when the recorded experts' weights are stored: "ends" (at the first recorded step and after the last),
      "bursts" (also at the start and the end of each burst, so that a replay can check each by itself), or "none".
    - `probe_every`: the probe batch (`Recorder(probe=...)`, stream "probe") is routed at step 1 and each so many steps.
    - `pair_elements`: statistics compare a gradient with the one before it in at most so many elements of each expert,
      evenly spaced; None for all. It bounds the memory for the step before (`Recorder.buffer_bytes`).
    - `dtype`: of recorded gradients and buffers; None keeps the native one.
    - `budget`: the size at which recording ends (training goes on), such as "10GiB"; None for no limit.
    """

    every: int = 1
    bursts: tuple[int, int] | None = None
    roles: tuple[str, ...] = ("router", "routed_expert")
    streams: tuple[str, ...] = ("gradient", "routing", "scalars")
    experts: str | int | tuple[int, ...] = "all"
    dtype: str | None = None
    budget: str | int | None = "10GiB"
    weights: str = "ends"
    resample: bool = False
    probe_every: int = 100
    pair_elements: int | None = None

    def __post_init__(self) -> None:
        for name, what in (("every", "steps"), ("probe_every", "steps"), ("pair_elements", "elements, or None")):
            self._check_count(name, what)
        if self.bursts is not None:
            self._set("bursts", self._checked_bursts())
        self._set("roles", _names("role", self.roles, (*ROLES, "backbone", "all")))
        self._set("streams", _names("stream", self.streams, STREAMS))
        self._set("experts", self._checked_experts())
        if self.dtype is not None and self.dtype not in _FLOATS:
            raise GradreelError(
                f"dtype {self.dtype!r} is not one to record in; choices: None (native), {', '.join(_FLOATS)}"
            )
        if self.budget is not None:
            parse_bytes(self.budget)
        if self.weights not in WEIGHTS:
            raise GradreelError(f"weights is {clip(self.weights)}; choices: {', '.join(WEIGHTS)}")
        if not isinstance(self.resample, bool):
            raise GradreelError(f"resample is {clip(self.resample)}, it must be True or False")
        if self.resample and (self.bursts is None or isinstance(self.experts, str | tuple)):
            raise GradreelError(
                "resample=True draws a sample at each burst: give bursts=(length, period) and experts=n"
            )

    def _check_count(self, name: str, what: str) -> None:
        value = getattr(self, name)
        if value is None and "None" in what:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise GradreelError(f"{name} is {clip(value)}, it must be a whole number of {what}, 1 to 2^53")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _checked_bursts(self) -> tuple[int, int]:
        pair = tuple(self.bursts) if isinstance(self.bursts, Sequence) and not isinstance(self.bursts, str) else ()
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
        if len(pair) != 2 or not whole or not 1 <= pair[0] <= pair[1] <= _MOST:
            raise GradreelError(
                f"bursts is {clip(self.bursts)}, it must be (length, period) with 1 <= length <= period <= 2^53"
            )
        if self.every != 1:
            raise GradreelError(
                f"every={self.every} with bursts={pair}: a burst records consecutive steps; give one of the two"
            )
        return pair

    def _checked_experts(self) -> str | int | tuple[int, ...]:
        value = self.experts
        if isinstance(value, str) and value == "all":
            return value
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST:
            return value
        if isinstance(value, Sequence) and not isinstance(value, str):
            ids = tuple(value)
            if (
                ids
                and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= _MOST for i in ids)
                and len(set(ids)) == len(ids)
            ):
                return tuple(sorted(ids))
        raise GradreelError(
            f"experts is {clip(value)}; it must be 'all', a number to sample per layer, or a list of different ids"
        )

    # ------------------------------------------------------------------------------------------------- decisions

    def records(self, step: int) -> bool:
        """Whether a step (counted from 1) is recorded."""
        if step < 1:
            return False
        if self.bursts is not None:
            return (step - 1) % self.bursts[1] < self.bursts[0]
        return (step - 1) % self.every == 0

    def starts_burst(self, step: int) -> bool:
        """Whether a step is recorded and the one before it is not."""
        return self.records(step) and not self.records(step - 1)

    def weighs(self, step: int) -> bool:
        """Whether the weights before a step are stored because a burst begins, or ended with the step before."""
        return self.weights == "bursts" and self.records(step) != self.records(step - 1)

    def probes(self, step: int) -> bool:
        """Whether the probe batch is routed before the update of a step."""
        return "probe" in self.streams and step >= 1 and (step - 1) % self.probe_every == 0

    def records_role(self, role: str) -> bool:
        """Whether tensors of a role are recorded."""
        if "all" in self.roles or role in self.roles:
            return True
        return ("router" in self.roles and role == "router_bias") or ("backbone" in self.roles and role in _BACKBONE)

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None for no limit."""
        return None if self.budget is None else parse_bytes(self.budget)

    def choose_experts(self, num_experts: int, load: Sequence[float] | np.ndarray | None = None) -> np.ndarray | None:
        """Ids of the experts of one layer to record, int64 increasing; None for all.

        `load` [E] is needed for a sample: the experts are ranked by it (ties by id) and taken at even distances.
        """
        if isinstance(self.experts, tuple):
            if self.experts[-1] >= num_experts:
                raise GradreelError(
                    f"experts names id {self.experts[-1]}, the layer has experts 0 to {num_experts - 1}"
                )
            return None if len(self.experts) == num_experts else np.array(self.experts, np.int64)
        if not isinstance(self.experts, int) or self.experts >= num_experts:
            return None
        order = np.argsort(np.zeros(num_experts) if load is None else np.asarray(load), kind="stable")
        return np.sort(order[self.places(num_experts)]).astype(np.int64)

    def places(self, num_experts: int) -> np.ndarray:
        """Ranks by load, idlest first, of the experts of a sample: at even distances, the busiest included; int64."""
        assert isinstance(self.experts, int)
        if self.experts == 1:
            return np.array([num_experts - 1], np.int64)
        return np.linspace(0, num_experts - 1, self.experts).round().astype(np.int64)

    # ------------------------------------------------------------------------------------------------------ size

    def recorded_count(self, steps: int) -> int:
        """How many of the first `steps` steps are recorded."""
        if self.bursts is None:
            return -(-steps // self.every)
        length, period = self.bursts
        return steps // period * length + min(steps % period, length)

    def step_bytes(
        self, params: Iterable[ParamInfo], layers: Iterable[LayerInfo], tokens_per_step: int, micro_steps: int = 1
    ) -> int:
        """Bytes of one recorded step: tensors in full, routing as if it did not compress."""
        params = list(params)
        recorded = policy_sizes.recorded_step(self, params, layers, tokens_per_step, micro_steps)
        return recorded + policy_sizes.every_step(self, params)

    def snapshot_bytes(self, params: Iterable[ParamInfo]) -> int:
        """Bytes of one snapshot of the recorded parameters' weights."""
        return policy_sizes.snapshot(self, params)

    def estimate(
        self,
        params: Iterable[ParamInfo],
        layers: Iterable[LayerInfo],
        tokens_per_step: int,
        steps: int = 1,
        *,
        micro_steps: int = 1,
        probe_tokens: int = 0,
    ) -> int:
        """Bytes of a trace over the first `steps` optimizer steps, weight snapshots included."""
        params, layers = list(params), list(layers)
        count = self.recorded_count(steps)
        total = count * policy_sizes.recorded_step(self, params, layers, tokens_per_step, micro_steps)
        total += steps * (policy_sizes.SCALAR_BYTES + policy_sizes.every_step(self, params))
        total += policy_sizes.snapshots(self, steps) * policy_sizes.snapshot(self, params)
        if "probe" in self.streams:
            total += (1 - -steps // self.probe_every) * policy_sizes.probe(layers, probe_tokens)
        return total

    def check_budget(self, params: Iterable[ParamInfo], layers: Iterable[LayerInfo], tokens_per_step: int) -> None:
        """Refuse a budget in which not even one step fits beside the first and the last weight snapshot."""
        params = list(params)
        needed, budget = self.estimate(params, layers, tokens_per_step), self.budget_bytes
        if budget is not None and needed > budget:
            raise GradreelError(
                f"budget {self.budget!r} is too small: one step and its weight snapshots need {format_bytes(needed)}; "
                "raise it, or record fewer roles, experts=8, dtype='bfloat16', or weights='none'"
            )

    # ------------------------------------------------------------------------------------------------------ JSON

    def to_json(self) -> dict[str, Any]:
        """The value as JSON, for the header."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RecordAt:
        """Undo `to_json`; unknown fields raise `GradreelError`, those that an older trace lacks take their default."""
        names = {f.name for f in fields(cls)}
        if unknown := set(value) - names:
            raise GradreelError(
                f"record policy: unknown field {sorted(unknown)[0]!r}; known are {', '.join(sorted(names))}"
            )
        return cls(**value)


def _names(kind: str, value: Any, choices: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(value, str | Iterable):
        raise GradreelError(f"{kind}s is {clip(value)}; name at least one of {', '.join(choices)}")
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names:
        raise GradreelError(f"{kind}s is empty; name at least one of {', '.join(choices)}")
    for name in names:
        if name not in choices:
            raise GradreelError(f"unknown {kind} {clip(name)}. Choices: {', '.join(choices)}")
    return tuple(dict.fromkeys(names))
