"""What a plot is: a function from a Frame to axes, with what it requires declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plot:
    """What a plot file exports as `PLOT`.

    `requires` names the metrics the Frame must hold; a missing one is an error that says which metric to add.
    `draw(frame, **options) -> Figure`. `caption` is one sentence that says how to read the figure.
    `about` says which report draws it: "updates" (of a replay or a run), "training" (an experiment's closed loop),
    "simulation", "study", "prediction", "agreement"; none draws "memory" (a plan's), "experts" and "trajectory" (the
    notebooks').
    """

    name: str
    title: str
    requires: tuple[str, ...]
    draw: Callable[..., Figure]
    caption: str
    per_expert: bool = False
    about: str = "updates"

    def missing(self, frame: pl.DataFrame) -> list[str]:
        """The required metrics that `frame` lacks."""
        present = set(frame["metric"].unique().to_list())
        return [name for name in self.requires if name not in present]

    def __call__(self, frame: pl.DataFrame, **options: Any) -> Figure:
        from traces.errors import GradreelError

        lacking = self.missing(frame)
        if lacking:
            raise GradreelError(
                f"plot {self.name} needs {', '.join(lacking)}, which this frame lacks; add --metric {lacking[0]}"
            )
        return self.draw(frame, **options)
