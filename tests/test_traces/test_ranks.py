"""Recording a run of several processes: what the reader puts together is what the ranks saw, bit for bit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.multiprocessing as mp
from polars.testing import assert_frame_equal

from toolkit import replay
from traces import GradreelError, NotRecorded, RecordAt, Recorder, TraceError, open_trace
from traces.recover import recover
from traces.synthetic import write_synthetic
from traces.verify import verify_trace

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
write_ranks = __import__("rank_folders").write_ranks
sys.path.remove(HERE)


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
    # Sharded weights and gradients replay as those of one process do.
    result = replay(open_trace(tmp_path / "fsdp.trace"), ["adamw", "mesh", "sinkgd"], progress=False)
    assert result.frame.height
    check = result.selfcheck("adamw")
    assert check.ok, check.message
    assert check.comparable
    assert check.compared > 4


@pytest.mark.full
def test_four_processes(tmp_path: Path) -> None:
    spawn(tmp_path, ["placements"], world=4)


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """The steps that both sealed are whole; of later ones, what the other rank holds is readable."""
    sys.path.insert(0, HERE)
    try:
        killed = __import__("rank_runs").killed
        ranks = [mp.get_context("spawn").Process(target=killed, args=(rank, str(tmp_path))) for rank in (0, 1)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    finally:
        sys.path.remove(HERE)
    assert [process.exitcode for process in ranks] == [0, -9]
    path = tmp_path / "killed.trace"
    trace = open_trace(path)
    assert not trace.finished
    common = trace.steps
    assert common[:2] == [1, 2], "the last one may have been on its way"
    assert [f for f in verify_trace(path) if f.severity == "damage"] == []
    name = "layers.0.mlp.experts.up_proj"
    for step in common:
        assert trace.gradient(name, step).shape == (3, 5, 4)  # type: ignore[union-attr]
    part = open_trace(path, partial=True)
    assert part.steps == [1, 2, 3, 4, 5, 6]
    assert part.gradient("layers.0.mlp.gate.weight", 6).unique().tolist() == [6.0]  # type: ignore[union-attr]
    assert part.gradient(name, 6, experts=[0, 1]).shape == (2, 5, 4)  # type: ignore[union-attr]
    with pytest.raises(NotRecorded, match="rank 1 sealed no step 6"):
        part.gradient(name, 6)
    assert recover(path).steps == common
    assert open_trace(path).finished
    assert [f for f in verify_trace(path) if f.severity == "damage"] == []


def test_identical_gradients_replay_identically(tmp_path: Path) -> None:
    """A trace, and the same dealt out to two ranks by experts, columns and stretches, give one frame."""
    one, two = tmp_path / "one.trace", tmp_path / "two.trace"
    write_synthetic(one, steps=6, layers=2, num_experts=5, tokens=40, width=4, hidden=4)
    write_ranks(one, two)
    recipes = ["adamw", "sinkgd", "mesh", "skewadam"]
    frames = []
    for path in (one, two):
        found = replay(open_trace(path), recipes, metrics=["update_rms", "tokens_per_expert"], progress=False).frame
        frames.append(found.filter(found["metric"] != "step_ms").drop("run"))
    assert frames[0].height > 50
    assert_frame_equal(frames[0], frames[1])


SCRIPT = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import rank_runs as runs

def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(runs.RankModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 4):
        model(runs.batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

main()
"""


def test_a_launched_script_is_recorded_as_it_is(tmp_path: Path) -> None:
    """The process-wide hook on each rank, as a launcher such as torchrun starts them."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "traces.bootstrap", str(tmp_path / "run.trace"), "--", "train.py", HERE]
    launched = []
    for rank in ("0", "1"):
        there = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, **there, "PYTHONPATH": root}
        launched.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[1] for process in launched]
    assert [process.returncode for process in launched] == [0, 0], said
    trace = open_trace(tmp_path / "run.trace")
    assert trace.finished
    assert trace.steps == [1, 2, 3]
    assert trace.verify() == []
    assert not list((tmp_path / "run.trace" / "rank-00001").glob("chunk-*"))
    routing = trace.routing_step(1, 1)
    assert routing is not None
    assert int(routing.tokens_per_expert.sum()) == 12, "the first forward counts on both ranks"


def test_what_cannot_be_recorded_of_several_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import traces.checks
    import traces.sharing

    sys.path.insert(0, HERE)
    try:
        model = __import__("rank_runs").RankModel()
    finally:
        sys.path.remove(HERE)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(GradreelError, match=r"process 1 of 2, but torch.distributed is not initialised"):
        Recorder(tmp_path / "x", model)
    for module in (traces.checks, traces.sharing):
        monkeypatch.setattr(module, "process_place", lambda: (1, 2))
    with pytest.raises(GradreelError, match=r"'micro_norms' cannot be recorded in a run of 2 processes"):
        Recorder(tmp_path / "x", model, at=RecordAt(streams=("gradient", "routing", "micro_norms")))
    with pytest.raises(GradreelError, match="gives two parameters the name"):
        Recorder(tmp_path / "x", model, global_names={"layers.0": "layers.1"})
    for held, says in (
        ([3], "different ids below"),
        ([1, 1], "different ids below"),
        ([0, 1], "global_expert_ids are 2"),
    ):
        layout = {"experts": "layers.*.mlp.experts", "num_experts": 3, "global_expert_ids": held}
        with pytest.raises(GradreelError, match=says):
            Recorder(tmp_path / "x", model, layout=layout)
    # A folder of another run: its own rank folder, another number of ranks, other files.
    for name in ("rank-00001", "rank-00002", "notes.txt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).mkdir()
        with pytest.raises(TraceError, match="is not an empty folder"):
            Recorder(tmp_path / name, model)
    (tmp_path / "other" / "rank-00000").mkdir(parents=True)
    Recorder(tmp_path / "other", model)  # rank 0 of this run was faster
    write_synthetic(tmp_path / "old.trace", steps=1)
    with pytest.raises(TraceError, match="already holds a trace"):
        Recorder(tmp_path / "old.trace", model)
