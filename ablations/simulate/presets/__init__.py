"""Simulations, one question a file. See `_preset.py` of the package above for what a file states."""

from __future__ import annotations

from ablations.simulate._preset import Simulation
from traces.registry import Registry

SIMULATIONS: Registry[Simulation] = Registry("ablations.simulate.presets", "SIMULATION", "simulation")

__all__ = ["SIMULATIONS", "Simulation"]
