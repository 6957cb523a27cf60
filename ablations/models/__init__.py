"""Models to ask questions with. Names are imported on first use, since they load torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablations.models.build import build_model
    from ablations.models.config import MoEConfig
    from ablations.models.huggingface import HuggingFace
    from ablations.models.moe import MoELanguageModel

_PLACES = {
    "HuggingFace": "ablations.models.huggingface",
    "MoEConfig": "ablations.models.config",
    "MoELanguageModel": "ablations.models.moe",
    "build_model": "ablations.models.build",
}
__all__ = ["HuggingFace", "MoEConfig", "MoELanguageModel", "build_model"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'ablations.models' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
