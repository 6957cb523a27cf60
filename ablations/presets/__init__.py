"""Experiments, one per file. See `_preset.py` for what a preset states."""

from ablations.presets._preset import Ablation
from traces.registry import Registry

PRESETS: Registry[Ablation] = Registry("ablations.presets", "ABLATION", "preset")

__all__ = ["PRESETS", "Ablation"]
