"""The options of the verb `record` as a `RecordAt`, and the running of a user's own script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces.bootstrap import record_script
from traces.errors import GradreelError

if TYPE_CHECKING:
    from traces.record_at import RecordAt

__all__ = ["record_at", "record_script"]


def record_at(
    *,
    every: int = 1,
    bursts: str | None = None,
    roles: str = "router,routed_expert",
    streams: str = "gradient,routing,scalars",
    experts: str = "all",
    dtype: str | None = None,
    budget: str = "10GiB",
) -> RecordAt:
    """Build the policy from option texts; `GradreelError` says which one is wrong."""
    from traces.record_at import RecordAt

    return RecordAt(
        every=every,
        bursts=None if bursts is None else _pair(bursts),
        roles=_names(roles),
        streams=_names(streams),
        experts=int(experts) if experts.isdecimal() else experts,
        dtype=dtype,
        budget=budget,
    )


def _pair(text: str) -> tuple[int, int]:
    parts = text.split("/")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise GradreelError(f"--bursts {text!r} must be LENGTH/PERIOD, such as 16/500")
    return int(parts[0]), int(parts[1])


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
