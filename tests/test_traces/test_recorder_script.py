"""A user's own script, recorded from outside, in a process of its own."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

import traces.sink
from traces.bootstrap import record_script, split_command
from traces.cli_record import record_at
from traces.errors import GradreelError
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder

SCRIPT = """
    import sys
    import torch
    from torch import nn

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts = 4
            self.weight = nn.Parameter(torch.randn(4, 8, 8))
        def forward(self, tokens, ids, weights):
            out = torch.einsum("tkde,te->tkd", self.weight[ids], tokens)
            return (out * weights[..., None]).sum(1)

    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = Experts()
        def forward(self, x, attention_mask=None):
            tokens = x.reshape(-1, 8)
            weights, ids = self.gate(tokens).softmax(-1).topk(2)
            return self.experts(tokens, ids, weights).view_as(x)

    def train(steps):
        torch.manual_seed(0)
        dense = nn.Linear(8, 8)
        dense(torch.randn(2, 8))  # another model, of no interest
        model = Moe()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            mask = torch.ones(2, 5)
            mask[0, 3:] = 0
            model(torch.randn(2, 5, 8), attention_mask=mask).square().mean().backward()
            if step == 0:
                torch.save(model.experts.weight.grad, "first.pt")
            optimizer.step()
            optimizer.zero_grad()

    if __name__ == "__main__":
        train(int(sys.argv[1]))
        sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_a_script_is_recorded_end_to_end(script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert record_script("run.trace", ["python", "-u", str(script), "3"], RecordAt(bursts=(2, 4))) == 0
    trace = open_trace(tmp_path / "run.trace")
    assert trace.finished
    assert trace.steps == [1, 2]
    assert trace.verify() == []
    rows = trace.routing().collect()
    assert rows.filter(step=1).height == 10
    assert rows.filter(step=1)["is_pad"].sum() == 2
    assert trace.scalars()["tokens"].to_list()[:3] == [8, 8, 8]
    assert trace.header.run["groups"][0]["params"] == ["gate.weight", "gate.bias", "experts.weight"]
    assert "gradreel: recording" in capfd.readouterr().err


def test_failures_of_the_script_and_of_the_recording(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert record_script("a.trace", ["python", str(script), "1", "7"]) == 7  # its own exit code, and a whole trace
    assert open_trace(tmp_path / "a.trace").finished
    capfd.readouterr()
    assert record_script("a.trace", [str(script), "1"]) == 2
    assert "already holds a trace" in capfd.readouterr().err
    dense = tmp_path / "dense.py"
    dense.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.randn(1, 2)).sum().backward()\n")
    assert record_script("b.trace", ["python", str(dense)]) == 2
    told = capfd.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert "no training forward of a model with MoE layers was seen" in told[0]
    assert not (tmp_path / "b.trace").exists()


def test_commands_are_split(script: Path) -> None:
    assert split_command(["python3", "-W", "ignore", "-m", "pkg.train", "--x"])[1:] == (
        ["-W", "ignore"],
        ["-m", "pkg.train", "--x"],
    )
    assert split_command([str(script), "5"])[2] == [str(script), "5"]
    for words, said in (
        ([], "no script to record"),
        (["accelerate", "launch"], "is no Python script"),
        (["python", "-c", "1"], "only a script or a module"),
        (["python", "missing.py"], "does not exist"),
    ):
        with pytest.raises(GradreelError, match=said):
            split_command(words)


def test_options_become_a_policy() -> None:
    assert record_at(bursts="16/500", experts="8", roles="router, routed_expert") == RecordAt(
        bursts=(16, 500), experts=8
    )
    with pytest.raises(GradreelError, match=r"--bursts 'x' must be LENGTH/PERIOD"):
        record_at(bursts="x")


def in_its_last_breath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> int:
    """Train three steps, then do `then`; return the exit code that the user sees."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(textwrap.dedent(SCRIPT.replace("train(int(sys.argv[1]))", f"train(3); {then}")))
    return record_script("a.trace", ["python", "train.py"])


def test_a_terminated_script_closes_its_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Job schedulers send SIGTERM; what is not sealed yet is not lost for it."""
    then = "import os, time; os.kill(os.getpid(), 15); time.sleep(60)"
    assert in_its_last_breath(tmp_path, monkeypatch, then) == 128 + 15
    trace = open_trace("a.trace")
    assert trace.finished
    assert trace.steps == [1, 2, 3]


def test_ending_the_command_ends_the_script_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = "import os, time; os.kill(os.getppid(), 15); time.sleep(60)"
    assert in_its_last_breath(tmp_path, monkeypatch, then) == 128 + 15
    assert open_trace("a.trace").steps == [1, 2, 3]


def test_a_killed_script_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert in_its_last_breath(tmp_path, monkeypatch, "import os; os.kill(os.getpid(), 9)") == 128 + 9
    assert (
        "the script was ended by SIGKILL; what was sealed is kept, run: gradreel recover a.trace"
        in capfd.readouterr()[1]
    )


def test_a_slow_run_is_sealed_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model, batches, parts, notes
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seconds, sealed in ((0.0, [1, 2, 3]), (60.0, None)):
        monkeypatch.setattr(traces.sink, "SEAL_SECONDS", seconds)
        path = tmp_path / f"{seconds}.trace"
        with Recorder(path, model, optimizer, notify=notes.append) as reel:
            for batch in batches[:4]:
                parts.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                reel.flush()
            seen = open_trace(path).steps
        assert seen[:3] == (sealed or [])
        assert open_trace(path).steps == [1, 2, 3, 4]
