"""One run: everything that decides its numbers, and nothing else. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ablations.models.config import MoEConfig
from ablations.models.huggingface import HuggingFace
from ablations.presets import Data, Size
from traces.errors import GradreelError

#: Changes where the same definition would give other numbers.
FORMAT = 1
#: Whose weight changes are measured, and matched where that is wanted: routed experts', or those of all parameters.
EXPERTS, ALL = "routed_expert", "all"
#: Entries that came after format 1, of a run and of a model, with the value that changes nothing: as long as they hold
#: it they are left out of the id, so that runs made before keep theirs.
ADDED_LATER: dict[str, Any] = {"routing": None}
ADDED_TO_MODELS: dict[str, Any] = {}


@dataclass(frozen=True)
class RunSpec:
    """The definition of one run. Its `id` names the folder of the run, so that equal runs are made once.

    `recipe` is an expression without lr; `lr` is its peak rate. `measured` says whose weight changes are measured
    ("routed_expert" or "all"), `matched` is the id of the run whose sizes of weight change this one takes over,
    `routing` that of the run whose recorded routing it trains on (None: its own). The code's version is no part of it:
    that is provenance.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    recipe: str
    lr: float
    seed: int
    steps: int
    batch: int
    length: int
    accumulation: int
    warmup: int
    schedule: str
    floor: float
    clip: float | None
    evaluations: int
    eval_batches: int
    eval_batch: int
    device: str
    measured: str = EXPERTS
    matched: str | None = None
    format: int = FORMAT
    routing: str | None = None

    @property
    def id(self) -> str:
        """16 hexadecimal digits of the sha256 of the definition as JSON."""
        values = asdict(self)
        for group, names in ((values, ADDED_LATER), (values["model"], ADDED_TO_MODELS)):
            for name, nothing in names.items():
                if group.get(name) == nothing:
                    del group[name]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The definition as plain values for JSON; `from_dict` takes it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunSpec:
        """The run that `to_dict` described."""
        values = {**ADDED_LATER, **values}
        unknown_keys = set(values) ^ {f.name for f in fields(cls)}
        if unknown_keys:
            raise GradreelError(f"this is no definition of a run: {', '.join(sorted(unknown_keys))} lacking or unknown")
        return cls(**values)

    def model_config(self) -> MoEConfig | HuggingFace:
        """The model as its configuration."""
        values = dict(self.model)
        if "architecture" in values:
            return HuggingFace(**values)
        return MoEConfig(**{**values, "moe_layers": tuple(values["moe_layers"])})

    def data_spec(self) -> Data:
        """The data as the preset named it."""
        return Data(**dict(self.data))


def run_spec(
    size: Size,
    recipe: str,
    lr: float,
    seed: int,
    *,
    measured: str = EXPERTS,
    matched: str | None = None,
    routing: str | None = None,
) -> RunSpec:
    """The run of `recipe` at `lr` from `seed` in `size`, with no settings left to apply."""
    return RunSpec(
        model=size.model.to_dict(),
        data={"source": size.data.source, "options": dict(size.data.options)},
        recipe=recipe,
        lr=lr,
        seed=seed,
        measured=measured,
        matched=matched,
        routing=routing,
        **{name: getattr(size, name) for name in _SHARED},
    )


_SHARED = (
    "steps",
    "batch",
    "length",
    "accumulation",
    "warmup",
    "schedule",
    "floor",
    "clip",
    "evaluations",
    "eval_batches",
    "eval_batch",
    "device",
)


@dataclass(frozen=True)
class Finished:
    """What is known of a run that ended: the content of its `run.json`.

    `final_loss` is the validation loss (nats per byte) after the last step, None where it diverged (at step
    `diverged_at`); `window_losses` its parts, one per validation window. The two hashes say what it began with and what
    it saw. `seconds` is no part of any comparison.
    """

    id: str
    spec: Mapping[str, Any]
    final_loss: float | None
    diverged_at: int | None
    weights_sha256: str
    batches_sha256: str
    window_losses: tuple[float, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict)
