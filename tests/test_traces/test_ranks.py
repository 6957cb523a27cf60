"""Recording a run of several processes: what the reader puts together is what the ranks saw, bit for bit."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.multiprocessing as mp

HERE = str(Path(__file__).parent)


def spawn(folder: Path, names: Sequence[str] | None = None, world: int = 2) -> None:
    """Run functions of `rank_runs` (default: all) one after another in one process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.path.insert(0, HERE)  # a spawned process imports the file by its folder's path
    try:
        runs = __import__("rank_runs")
        mp.spawn(runs.run_all, args=(port, str(folder), list(names or runs.EVERY), world), nprocs=world)
    finally:
        sys.path.remove(HERE)


def test_two_processes(tmp_path: Path) -> None:
    spawn(tmp_path)
