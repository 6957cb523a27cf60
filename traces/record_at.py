"""What to record, and when: one frozen value, checked where it is built and kept in the trace's header."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traces._json import clip
from traces.errors import GradreelError
from traces.routing import id_dtype
from traces.schema import DTYPES, LayerInfo
from traces.views import ROLES, STREAMS, ParamInfo

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_BUDGET = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")
_TENSOR_STREAMS = ("gradient", "grad_buffer")
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_MOST = 1 << 53  # what the header of a trace can hold
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
    - `streams`: names of `traces.views.STREAMS`; weights are always stored at the first recorded step and after the
      last, naming "weight" stores them at every recorded step.
    - `experts`: "all"; a number n, for a sample of n per layer spread evenly over the load at the first recorded step
      (busiest and idlest included); or a list of ids.
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

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or not 1 <= self.every <= _MOST:
            raise GradreelError(f"every is {clip(self.every)}, it must be a whole number of steps, 1 to 2^53")
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
        places = np.linspace(0, num_experts - 1, self.experts).round().astype(np.int64)
        if self.experts == 1:
            places = np.array([num_experts - 1])
        return np.sort(order[places]).astype(np.int64)

    # ------------------------------------------------------------------------------------------------------ size

    def recorded_count(self, steps: int) -> int:
        """How many of the first `steps` steps are recorded."""
        if self.bursts is None:
            return -(-steps // self.every)
        length, period = self.bursts
        return steps // period * length + min(steps % period, length)

    def step_bytes(self, params: Iterable[ParamInfo], layers: Iterable[LayerInfo], tokens_per_step: int) -> int:
        """Bytes of one recorded step: tensors in full, routing as if it did not compress."""
        total = 0
        for param in self._kept(params):
            width = DTYPES[self.dtype or param.dtype][1].itemsize
            count = self._elements(param)
            total += sum(count * width for stream in _TENSOR_STREAMS if stream in self.streams)
            total += param.numel * DTYPES[param.dtype][1].itemsize if "weight" in self.streams else 0
        for layer in layers:
            id_bytes = id_dtype(layer.num_experts).itemsize
            total += tokens_per_step * layer.top_k * id_bytes if "routing" in self.streams else 0
            total += tokens_per_step * layer.top_k * 4 if "scores" in self.streams else 0
            total += tokens_per_step * layer.num_experts * 4 if "logits" in self.streams else 0
        return total + 1024  # its record in the seal, and keys

    def snapshot_bytes(self, params: Iterable[ParamInfo]) -> int:
        """Bytes of one snapshot of the recorded parameters' weights."""
        return sum(p.numel * DTYPES[p.dtype][1].itemsize for p in self._kept(params))

    def estimate(
        self, params: Iterable[ParamInfo], layers: Iterable[LayerInfo], tokens_per_step: int, steps: int = 1
    ) -> int:
        """Bytes of a trace over the first `steps` optimizer steps, both weight snapshots included."""
        params, layers = list(params), list(layers)
        count = self.recorded_count(steps)
        return count * self.step_bytes(params, layers, tokens_per_step) + 2 * self.snapshot_bytes(params) + 200 * steps

    def check_budget(self, params: Iterable[ParamInfo], layers: Iterable[LayerInfo], tokens_per_step: int) -> None:
        """Refuse a budget in which not even one step fits beside both weight snapshots."""
        params = list(params)
        needed, budget = self.estimate(params, layers, tokens_per_step), self.budget_bytes
        if budget is not None and needed > budget:
            raise GradreelError(
                f"budget {self.budget!r} is too small: one step and two weight snapshots need {format_bytes(needed)}; "
                "raise it, or record fewer roles, experts=8, or dtype='bfloat16'"
            )

    def _kept(self, params: Iterable[ParamInfo]) -> Iterable[ParamInfo]:
        return (p for p in params if p.tied_to is None and self.records_role(p.role))

    def _elements(self, param: ParamInfo) -> int:
        total = param.shape[param.expert_axis] if param.expert_axis is not None else 0
        if not total or self.experts == "all" or param.role != "routed_expert":
            return param.numel
        kept = len(self.experts) if isinstance(self.experts, tuple) else int(self.experts)
        return param.numel // total * min(kept, total)

    # ------------------------------------------------------------------------------------------------------ JSON

    def to_json(self) -> dict[str, Any]:
        """The value as JSON, for the header."""
        return {
            "every": self.every,
            "bursts": None if self.bursts is None else list(self.bursts),
            "roles": list(self.roles),
            "streams": list(self.streams),
            "experts": list(self.experts) if isinstance(self.experts, tuple) else self.experts,
            "dtype": self.dtype,
            "budget": self.budget,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RecordAt:
        """Undo `to_json`; unknown fields raise `GradreelError`."""
        names = {"every", "bursts", "roles", "streams", "experts", "dtype", "budget"}
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
