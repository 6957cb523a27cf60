"""Where a result comes from: machine, versions, and the commit of the code. Never part of what is compared."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

_HOUSE = Path(__file__).resolve().parents[2]


def provenance(device: str) -> dict[str, Any]:
    """Machine, versions of what computes, and the code's commit, as plain values for JSON."""
    from toolkit.replay._provenance import machine, versions

    return {"machine": machine(device), "versions": versions(), "commit": commit()}


@cache
def commit() -> str | None:
    """The commit of this project's sources, with "+changes" behind it where files differ from it; None if unknown."""
    if not (_HOUSE / ".git").exists():
        return None
    try:
        name = _git("rev-parse", "HEAD")
        return name + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(_HOUSE), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()
