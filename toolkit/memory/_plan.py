"""A memory plan: every byte of a training step on the fullest GPU, by category and role, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.memory._settings import Parallel, Precision, Run

if TYPE_CHECKING:
    import polars as pl

GIB, GB = 1 << 30, 10**9
#: Categories in the order they are shown, with what each one is. All in bytes.
CATEGORIES = {
    "weight_bytes": "weights, with buffers that are no parameters",
    "gradient_bytes": "gradients that the optimizer step meets",
    "state_bytes": "optimizer state, without step counters",
    "pinned_gradient_bytes": "gradient buffers that must survive between steps (hidden momentum)",
    "step_counter_bytes": "step counters, which published tables leave out",
    "master_weight_bytes": "a second copy of the weights, which the optimizer steps",
    "activation_bytes": "what forward keeps for backward",
    "step_temporary_bytes": "temporaries at the peak of one optimizer step",
    "workspace_bytes": "short-lived buffers of forward and backward: loss, recomputation, gathered weights",
}
#: Categories that live at the same time in each phase of a training step.
PHASES = {
    "forward and backward": ("activation_bytes", "workspace_bytes"),
    "step": ("step_temporary_bytes",),
}


@dataclass(frozen=True)
class MemoryPlan:
    """What one recipe needs on the fullest GPU of a run.

    `rows` maps (category, role or None) to bytes; `peak_bytes` is the largest phase, `peak_phase` its name.
    `host_bytes`: what an offloaded optimizer keeps on the host instead. `assumptions`: one line each.
    """

    model: str
    recipe: str
    parameters: int
    rows: dict[tuple[str, str | None], int]
    peak_bytes: int
    peak_phase: str
    precision: Precision
    parallel: Parallel
    run: Run
    host_bytes: int = 0
    assumptions: tuple[str, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)

    def bytes_of(self, category: str, role: str | None = None) -> int:
        """Bytes of a category, of one role or of all."""
        return sum(b for (c, r), b in self.rows.items() if c == category and role in (None, r))

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state, without step counters."""
        return self.bytes_of("state_bytes")

    @property
    def pinned_gradient_bytes(self) -> int:
        """Bytes of gradient buffers that must survive between steps."""
        return self.bytes_of("pinned_gradient_bytes")

    @property
    def frame(self) -> pl.DataFrame:
        """The plan as a Frame: a row per category and role, `peak_bytes` and `parameters` as rows of the whole run."""
        raise NotImplementedError

    def fits(self, gib: float) -> bool:
        """Whether the peak is at most `gib` x 2^30 bytes."""
        return self.peak_bytes <= gib * GIB

    def lines(self) -> list[str]:
        """The plan as plain text: one line per category, in bytes, GiB and GB."""
        raise NotImplementedError


def plan_memory(
    source: Any,
    recipe: Any,
    *,
    precision: Precision | None = None,
    parallel: Parallel | None = None,
    run: Run | None = None,
    **settings: Any,
) -> MemoryPlan:
    """Plan. `settings` are fields of Precision, Parallel or Run, for calls without those objects."""
    raise NotImplementedError
