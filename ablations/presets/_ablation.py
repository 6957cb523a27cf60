"""What an experiment states before anything is run: question, arms, sizes, and what decides. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from ablations.models.config import MoEConfig
from ablations.models.huggingface import HuggingFace
from traces.errors import GradreelError, unknown

#: The three ways arms are compared: at one lr, each at its own best lr, and with the baseline's sizes of weight change.
WAYS = ("shared", "tuned", "matched")
SIZES = ("cpu", "gpu", "paper")
ROUTINGS = ("live", "recorded")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
#: The one setting of an experiment that has no others.
ONLY = ""


@dataclass(frozen=True)
class Data:
    """What is trained on, by name: `source` is "stdlib" (the offline corpus, bytes) or one that `ablations.data` adds.

    `options` go to that source. Validation losses, which decide, are in nats per byte where the source knows how many
    bytes a token stands for, so that thresholds mean the same; training losses are per token.
    """

    source: str = "stdlib"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Size:
    """One size of an experiment: the model, the data, the training, and the rates that are tried.

    A step takes `accumulation` micro-batches of `batch` sequences of `length` tokens. The lr rises over `warmup` steps
    and then follows `schedule` ("cosine", "linear", "constant", "wsd") down to `floor` times its peak. `grid` holds the
    experts' rates that are tried, `grids` those of single arms; `shared_lr` is the rate at which all arms are compared,
    `rest_lr` that of AdamW on every other role. The best rate is chosen on `tuning_seeds`, all `seeds` are compared.
    `evaluations` is how often the validation loss is taken, the last time over `eval_batches` batches, before that over
    a quarter of them. `settings` name changes of this size under which the arms are compared anew, each by itself.
    """

    model: MoEConfig | HuggingFace
    steps: int
    batch: int
    length: int
    grid: tuple[float, ...]
    shared_lr: float
    rest_lr: float = 2e-3
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    data: Data = Data()
    warmup: int = 0
    schedule: str = "cosine"
    floor: float = 0.0
    accumulation: int = 1
    clip: float | None = 1.0
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seeds: tuple[int, ...] = (0,)
    evaluations: int = 4
    eval_batches: int = 16
    eval_batch: int = 16
    device: str = "cpu"
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {ONLY: {}})

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "accumulation", "evaluations", "eval_batches", "eval_batch"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(0 <= self.warmup <= self.steps, "warmup", self.warmup, f"[0, steps = {self.steps}]")
        for name in ("grid", "seeds", "tuning_seeds", "settings"):
            _require(len(getattr(self, name)) >= 1, name, getattr(self, name), "at least one entry")
        _require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "distinct numbers")
        _require(set(self.tuning_seeds) <= set(self.seeds), "tuning_seeds", self.tuning_seeds, f"some of {self.seeds}")
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)
        for rates in (self.grid, *self.grids.values()):
            sound = rates and len(set(rates)) == len(rates) and all(math.isfinite(r) and r > 0 for r in rates)
            _require(bool(sound), "grid", rates, "distinct rates in (0, inf)")
        for name in ("shared_lr", "rest_lr"):
            rate = getattr(self, name)
            _require(math.isfinite(rate) and rate > 0, name, rate, "(0, inf)")
        if isinstance(self.model, MoEConfig):
            limit = self.model.max_positions
            _require(self.length <= limit, "length", self.length, f"up to max_positions = {limit}")

    def rates(self, arm: str) -> tuple[float, ...]:
        """The rates of `arm`, ascending."""
        return tuple(sorted(self.grids.get(arm, self.grid)))

    def under(self, setting: str) -> Size:
        """This size with the changes of `setting` made."""
        if setting not in self.settings:
            raise unknown("setting", setting, self.settings)
        return changed(self, self.settings[setting])

    def to_dict(self) -> dict[str, Any]:
        """The size as plain values for JSON."""
        return {**asdict(self), "model": self.model.to_dict()}


@dataclass(frozen=True)
class Arm:
    """A recipe in an experiment: `recipe` is its expression, `note` one line about why it is there.

    With `routing="recorded"` the arm trains on the expert ids that the baseline's run of the same seed at the shared
    rate executed, and not on its own choice; it is evaluated with its own.
    """

    recipe: str
    note: str = ""
    routing: str = "live"

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise unknown("routing of an arm", self.routing, ROUTINGS)


@dataclass(frozen=True)
class Ablation:
    """What an experiment file exports as `ABLATION`: a question, arms that differ in one thing, and a rule.

    `decides` says in words what would answer the question; an arm is better or worse than the `baseline` when the
    interval of its paired differences leaves out 0 and their mean is at least `threshold` nats per byte. `found` is
    what the reference runs showed, in words. With `experts_only` every arm gets `+adam_rest`, so that arms differ in
    the experts alone. `ways` are the comparisons that make sense here, see `WAYS`.
    """

    name: str
    question: str
    decides: str
    arms: Mapping[str, Arm]
    baseline: str
    sizes: Mapping[str, Size]
    threshold: float = 0.005
    experts_only: bool = True
    ways: tuple[str, ...] = WAYS
    found: str = ""

    def __post_init__(self) -> None:
        if self.baseline not in self.arms:
            raise GradreelError(f"preset {self.name}: baseline {self.baseline!r} is not among its arms")
        if self.arms[self.baseline].routing != "live":
            raise GradreelError(f"preset {self.name}: the baseline's routing is what others train on; it must be live")
        if not self.threshold >= 0:
            raise GradreelError(f"preset {self.name}: threshold is {self.threshold}; allowed: [0, inf)")
        for way in self.ways:
            if way not in WAYS:
                raise unknown("way", way, WAYS)
        for size in self.sizes.values():
            for arm in size.grids:
                if arm not in self.arms:
                    raise unknown(f"arm of a grid in preset {self.name}", arm, self.arms)
            for setting in size.settings:
                size.under(setting)
        object.__setattr__(self, "arms", MappingProxyType(dict(self.arms)))
        object.__setattr__(self, "sizes", MappingProxyType(dict(self.sizes)))

    @property
    def summary(self) -> str:
        """One line for lists."""
        return self.question

    def size(self, name: str) -> Size:
        """The size called `name`."""
        if name not in self.sizes:
            raise unknown(f"size of preset {self.name}", name, self.sizes)
        return self.sizes[name]

    def expression(self, arm: str, size: Size) -> str:
        """The recipe expression of `arm`, without its own lr."""
        text = self.arms[arm].recipe
        return f"{text}+adam_rest({size.rest_lr!r})" if self.experts_only else text

    def only(self, arms: tuple[str, ...]) -> Ablation:
        """The same experiment with the baseline and `arms`, in the order they had."""
        for arm in arms:
            if arm not in self.arms:
                raise unknown(f"arm of preset {self.name}", arm, self.arms)
        kept = {name: arm for name, arm in self.arms.items() if name in arms or name == self.baseline}
        sizes = {
            name: replace(size, grids={a: g for a, g in size.grids.items() if a in kept})
            for name, size in self.sizes.items()
        }
        return replace(self, arms=kept, sizes=sizes)

    def to_dict(self) -> dict[str, Any]:
        """The experiment as plain values, for the provenance of what it produced."""
        return {
            "preset": self.name,
            "question": self.question,
            "decides": self.decides,
            "threshold": self.threshold,
            "baseline": self.baseline,
            "arms": {name: asdict(arm) for name, arm in self.arms.items()},
            "experts_only": self.experts_only,
            "ways": list(self.ways),
        }


def changed(size: Size, changes: Mapping[str, Any]) -> Size:
    """`size` with `changes` made; a key `model.NAME` changes one entry of the model. Unknown keys are errors."""
    own = {key: value for key, value in changes.items() if not key.startswith("model.")}
    of_model = {key.removeprefix("model."): value for key, value in changes.items() if key.startswith("model.")}
    allowed = {f.name for f in fields(size)} - {"model"}
    for key in own:
        if key not in allowed:
            raise unknown("entry of a size", key, allowed | {f"model.{f.name}" for f in fields(size.model)})
    for key in of_model:
        if key not in {f.name for f in fields(size.model)}:
            raise unknown("entry of a model", key, {f.name for f in fields(size.model)})
    for key, value in of_model.items():  # of a mapping only the entries that are named
        if isinstance(value, Mapping):
            of_model[key] = {**getattr(size.model, key), **value}
    model = replace(size.model, **of_model) if of_model else size.model
    return replace(size, model=model, **own)


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise GradreelError(f"size of an experiment: {name} is {value}; allowed: {allowed}")
