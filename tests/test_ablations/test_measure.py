"""What a live run holds, category by category, is what was planned; on a CPU the peak is resident memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ablations.cli_measure import main, plan_of
from ablations.cli_measure import measure as measure_verb
from ablations.data.corpus import stdlib_corpus
from ablations.models import MoELanguageModel
from ablations.presets import PRESETS
from toolkit.memory._measure import EXACT, Meter, measure
from toolkit.optim import make_optimizer
from traces.errors import GradreelError

ROOT = Path(__file__).resolve().parents[2]


def run(make: Any, steps: int = 2, micro_steps: int = 1) -> Meter:
    preset: Any = PRESETS.get("demo")
    torch.manual_seed(0)
    model = MoELanguageModel(preset.model).train()
    optimizer, corpus = make(model), stdlib_corpus()
    with Meter() as meter:
        for step in range(1, steps + 1):
            for micro in range(micro_steps):
                out = model(**corpus.batch(0, step, 2, 32, micro))
                out.loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return meter


@pytest.mark.parametrize("name", ["adamw", "skewadam", "mesh", "mesh_b", "muon", "galore", "adafactor", "sgd"])
def test_every_exact_category_is_what_was_planned(name: str) -> None:
    meter = run(lambda model: make_optimizer(model, name), micro_steps=2)
    measured, plan = meter.require(), plan_of(meter)
    assert plan is not None
    for category in EXACT:
        assert measured.bytes[category] == plan.bytes_of(category), category
    assert (measured.batch, measured.sequence, measured.micro_steps, measured.steps) == (2, 32, 2, 2)
    assert measured.bytes["pinned_gradient_bytes"] == meter.optimizer.pinned_gradient_bytes
    # Resident memory is coarse, but it cannot miss the tensors that are there.
    assert measured.peak_bytes >= sum(measured.bytes.values())


def test_momentum_beside_the_gradient_counts_both() -> None:
    meter = run(lambda model: make_optimizer(model, "mesh", hidden_momentum="apart"))
    measured, plan = meter.require(), plan_of(meter)
    assert plan is not None
    assert plan.run.hidden_momentum == "apart"
    for category in EXACT:
        assert measured.bytes[category] == plan.bytes_of(category), category
    assert measured.bytes["gradient_bytes"] == measured.bytes["weight_bytes"]


def test_torchs_own_optimizer_has_the_state_of_the_recipe() -> None:
    meter = run(lambda model: torch.optim.AdamW(model.parameters()))
    measured, plan = meter.require(), plan_of(meter)
    assert plan is not None
    assert measured.bytes["state_bytes"] == plan.state_bytes == 2 * measured.bytes["weight_bytes"]
    # torch counts in float32, one number a parameter; this project in int64.
    assert 2 * measured.bytes["step_counter_bytes"] == plan.bytes_of("step_counter_bytes")


def test_reading_without_an_optimizer_and_of_no_module() -> None:
    model = torch.nn.Linear(3, 5)
    model.weight.grad = torch.zeros(5, 3)
    found = measure(model).bytes
    assert found == {**dict.fromkeys(EXACT, 0), "weight_bytes": 80, "gradient_bytes": 60}
    with pytest.raises(GradreelError, match=r"allowed: a torch\.nn\.Module"):
        measure("model")  # type: ignore[arg-type]


def test_a_run_without_a_step_is_one_line() -> None:
    with pytest.raises(GradreelError, match="no optimizer step"):
        run(lambda model: make_optimizer(model, "adamw"), steps=0).require()


SCRIPT = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", sys.argv[1])
"""


def test_a_users_script_is_measured_beside_its_plan(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code = "from ablations.cli import main; main()"
    words = [sys.executable, "-c", code, "measure", "--", "python", str(script), "here"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "trained here" in done.stdout
    size = 4 * (64 * 256 + 256 + 256 * 8 + 8)
    rows = {line.split("  ")[0].strip(): line.split() for line in done.stdout.splitlines()}
    assert rows["weight"][1] == rows["gradient"][1] == f"{size:,}"
    assert rows["state"][1] == rows["state"][3] == f"{2 * size:,}"


@pytest.mark.parametrize(("text", "code"), [("import sys\nsys.exit(3)\n", 3), ("print('no training')\n", 2)])
def test_a_script_that_trains_nothing(
    text: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["--", str(script)]) == code
    said = capsys.readouterr().err
    assert ("no optimizer step" in said) == (code == 2)
    assert said.count("\n") == (code == 2)


def test_one_thing_to_measure_is_needed() -> None:
    for words in ([], ["--preset", "demo", "--", "python", "train.py"]):
        with pytest.raises(GradreelError, match="needs one thing to run"):
            measure_verb(words[3:], "demo" if words else None)
