"""The notebooks run from top to bottom on a small trace, and lie in the repository with outputs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
#: What makes a notebook small enough for a test; a notebook takes those of them that it names.
SMALL = {"STEPS": 5, "BATCH": 2, "LENGTH": 32, "RECIPES": ["adamw", "sinkgd", "mesh"], "MODELS": ["skewadam-6.78b"]}
#: Notebooks that replay write a report, and show more figures.
REPLAYS = ("01_record_and_replay",)


def parameter_cell(notebook: Any) -> Any:
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    assert len(tagged) == 1
    return tagged[0]


def with_parameters(notebook: Any) -> Any:
    cell = parameter_cell(notebook)
    lines = [f"{name} = {value!r}" for name, value in SMALL.items() if f"{name} =" in cell.source]
    assert lines
    cell.source += "\n" + "\n".join(lines)
    return notebook


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS][:1] == ["01_record_and_replay.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_kept_with_its_outputs_and_without_errors(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the notebooks extra is not installed")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [out for cell in code for out in cell.outputs]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [out for out in outputs if out.output_type == "error"]
    assert sum("image/png" in out.get("data", {}) for out in outputs) >= (6 if path.stem in REPLAYS else 3)
    assert path.stat().st_size < 3_000_000
    # A reader learns the question before seeing the answer.
    for before, cell in zip(notebook.cells, notebook.cells[1:], strict=False):
        if cell.cell_type == "code" and any("image/png" in out.get("data", {}) for out in cell.outputs):
            assert before.cell_type == "markdown"
            assert "?" in before.source


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs_on_a_small_trace(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="the notebooks extra is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the notebooks extra is not installed")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(path.parents[1]), os.environ.get("PYTHONPATH", "")]))
    notebook = with_parameters(nbformat.read(path, as_version=4))
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    reports = list(tmp_path.glob("gradreel-*/report.html"))
    assert len(reports) == (path.stem in REPLAYS)
    for report in reports:
        assert "Replay is open-loop" in report.read_text(encoding="utf-8")
