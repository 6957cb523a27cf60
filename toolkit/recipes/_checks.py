"""Checks that option dataclasses share. Each message gives the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toolkit.recipes._recipe import interval
from toolkit.stages._rounding import ROUNDINGS
from traces.errors import GradreelError

IDLE_POLICIES = ("skip", "decay", "as_zero")
INFINITY = float("inf")
#: A larger rate or decay only overflows float32.
MOST = 1e30


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise unless `value` is among `allowed`."""
    choices = tuple(allowed)
    if value not in choices:
        raise GradreelError(f"{name} is {value!r}; allowed: {', '.join(str(c) for c in choices)}")


def betas(name: str, values: tuple[float, ...]) -> None:
    """Two decay factors in [0, 1)."""
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise GradreelError(f"{name} is {values!r}; allowed: two numbers in [0, 1)")
    for index, value in enumerate(values):
        interval(f"{name}[{index}]", value, 0.0, 1.0, open_high=True)


def positive(name: str, value: float) -> None:
    """A number in (0, inf)."""
    interval(name, value, 0.0, INFINITY, open_low=True, open_high=True)


def not_negative(name: str, value: float) -> None:
    """A number in [0, inf)."""
    interval(name, value, 0.0, INFINITY, open_high=True)


def rate(name: str, value: Any) -> float:
    """A learning rate of a group as a float: a number, or the 0-d tensor some schedulers leave, in [0, MOST]."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise GradreelError(f"{name} is {value!r}; allowed: a number in [0.0, {MOST:g}]") from None
    interval(name, number, 0.0, MOST)
    return number


def whole(name: str, value: int, low: int = 1) -> None:
    """A whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise GradreelError(f"{name} is {value!r}; allowed: whole numbers of at least {low}")


def common(lr: float, weight_decay: float | None, idle: str, rounding: str | None) -> None:
    """What every recipe has."""
    not_negative("lr", lr)
    not_negative("weight_decay", weight_decay)  # type: ignore[arg-type]
    interval("weight_decay", weight_decay, 0.0, MOST)  # type: ignore[arg-type]
    one_of("idle", idle, IDLE_POLICIES)
    one_of("rounding", rounding, ROUNDINGS)
