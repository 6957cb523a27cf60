"""`stage("ema", beta=0.95)`: the words recipe tables are written in."""

from __future__ import annotations

from typing import Any

from toolkit.stages._stage import Stage


def stage(name: str, **options: Any) -> Stage:
    """The stage of the file `name`, with some of its switches set."""
    from toolkit.stages import STAGES

    return STAGES.get(name).with_options(**options)
