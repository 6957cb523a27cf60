"""Linear experts in a closed loop, thousands of runs at once: where does stateless normalisation fail?"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablations.simulate._engine import Lane, Outcome, run_lanes
    from ablations.simulate._preset import Simulation, grid, rates
    from ablations.simulate._result import Effect
    from ablations.simulate._run import SimulationResult, simulate
    from ablations.simulate._world import World

_PLACES = {
    "Effect": "ablations.simulate._result",
    "Lane": "ablations.simulate._engine",
    "Outcome": "ablations.simulate._engine",
    "Simulation": "ablations.simulate._preset",
    "SimulationResult": "ablations.simulate._run",
    "World": "ablations.simulate._world",
    "grid": "ablations.simulate._preset",
    "rates": "ablations.simulate._preset",
    "run_lanes": "ablations.simulate._engine",
    "simulate": "ablations.simulate._run",
}
__all__ = [
    "Effect",
    "Lane",
    "Outcome",
    "Simulation",
    "SimulationResult",
    "World",
    "grid",
    "rates",
    "run_lanes",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'ablations.simulate' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


class _Callable(ModuleType):
    """This package under the name it shares with its function: whichever an import hands out, it simulates."""

    def __call__(self, *arguments: Any, **options: Any) -> SimulationResult:
        """`ablations.simulate.simulate` with these arguments."""
        result: SimulationResult = self.simulate(*arguments, **options)
        return result


# Importing a subpackage binds it in its parent, so `from ablations import simulate` gives this module.
sys.modules[__name__].__class__ = _Callable
