"""Models that many people know, by name, for plans: one JSON file each in the folder `known/`.

A file holds `summary`, `parameters` (the public count, as its source rounds it), `source`, and `config`: what a Hugging
Face config class takes, or the fields of `MoEConfig` under the model type "gradreel" (with `expert_weights`: "list"
gives each expert matrices of its own). Importing this module registers the names with the memory planner.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ablations.models.config import MoEConfig
from toolkit.memory import register_builder, register_models
from traces.errors import GradreelError, unknown

FOLDER = Path(__file__).with_suffix("")
MODEL_TYPE = "gradreel"


@dataclass(frozen=True)
class KnownModel:
    """One file of the folder. `parameters` is the published count, such as "46.7B"."""

    name: str
    summary: str
    parameters: str
    source: str
    config: dict[str, Any]


class KnownModels:
    """The folder as a registry that `gradreel list models` shows."""

    package = "ablations.models"

    def names(self) -> list[str]:
        """Every name, sorted."""
        return sorted(file.stem for file in FOLDER.glob("*.json"))

    def get(self, name: str) -> KnownModel:
        """The model of that name; an unknown one is an error with the choices."""
        if name not in self.names():
            raise unknown("model", name, self.names())
        values = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        summary = f"{values['parameters']} parameters: {values['summary']}"
        return KnownModel(name, summary, values["parameters"], values["source"], values["config"])

    def all(self) -> list[KnownModel]:
        """All of them."""
        return [self.get(name) for name in self.names()]


KNOWN = KnownModels()


def _config(name: str) -> dict[str, Any]:
    return KNOWN.get(name).config


def _build(values: dict[str, Any]) -> Any:
    from ablations.models.moe import MoELanguageModel

    allowed = {f.name for f in fields(MoEConfig)}
    given = {key: value for key, value in values.items() if key not in ("model_type", "expert_weights")}
    weights = values.get("expert_weights", "stacked")
    if weights not in ("stacked", "list"):
        raise GradreelError(f"expert_weights is {weights!r}; allowed: stacked, list")
    wrong = next((key for key in given if key not in allowed), None)
    if wrong is not None:
        raise unknown("MoEConfig field", wrong, allowed)
    try:
        config = MoEConfig(**{**given, "moe_layers": tuple(given.get("moe_layers", ()))})
    except TypeError as error:
        raise GradreelError(f"config of model_type {MODEL_TYPE}: {error}") from None
    model = MoELanguageModel(config)
    if weights == "list":
        from ablations.models.expert_list import list_experts

        return list_experts(model)
    return model


register_models(KNOWN.names, _config)
register_builder(MODEL_TYPE, _build)
