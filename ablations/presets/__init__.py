"""Experiments, one per file. See `_ablation.py` for what an experiment states, `_recording.py` for the demo's form."""

from __future__ import annotations

from ablations.presets._ablation import SIZES, WAYS, Ablation, Arm, Data, Size
from ablations.presets._recording import Recording
from traces.errors import GradreelError
from traces.registry import Registry

PRESETS: Registry[Ablation | Recording] = Registry("ablations.presets", "ABLATION", "preset")


def load_preset(name: str | Ablation) -> Ablation:
    """The experiment called `name`; one that only records, such as the demo, is a GradreelError."""
    preset = PRESETS.get(name) if isinstance(name, str) else name
    if not isinstance(preset, Ablation):
        raise GradreelError(f"preset {preset.name} records one run and compares none; use it with: gradreel record")
    return preset


def recording(name: str) -> Recording:
    """The recording called `name`; an experiment is a GradreelError."""
    preset = PRESETS.get(name)
    if not isinstance(preset, Recording):
        raise GradreelError(f"preset {name} is an experiment of many runs; run it with: gradreel run {name}")
    return preset


__all__ = ["PRESETS", "SIZES", "WAYS", "Ablation", "Arm", "Data", "Recording", "Size", "load_preset", "recording"]
