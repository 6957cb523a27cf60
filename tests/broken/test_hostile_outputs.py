"""Output paths that would destroy something: refused before any work, with what is there left as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from toolkit.frame import FrameWriter, empty_frame, read_frame
from toolkit.report import write_report
from traces.errors import GradreelError
from traces.synthetic import write_synthetic
from traces.verify import verify_trace


def refused(path: Path, says: str) -> None:
    with pytest.raises(GradreelError, match=says) as error:
        FrameWriter(path)
    assert "\n" not in str(error.value)
    with pytest.raises(GradreelError, match=says):
        write_report(path, empty_frame(), title="t", provenance={})


def test_no_file_of_a_trace_is_replaced(tmp_path: Path) -> None:
    trace = tmp_path / "a.trace"
    write_synthetic(trace, steps=2, tokens=8)
    for name in ("header.json", "new.parquet", "rank-00000/chunk-000000.safetensors", "rank-00000/new.html"):
        refused(trace / name, "inside a trace")
    assert verify_trace(trace) == []


def test_no_file_of_another_kind_is_replaced(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    refused(script, "holds something else")
    assert script.read_text() == "import torch\n"
    frame, page = tmp_path / "a.parquet", tmp_path / "a.html"
    FrameWriter(frame).close()
    with pytest.raises(GradreelError, match="holds something else"):
        write_report(frame, empty_frame(), title="t", provenance={})
    assert read_frame(frame).is_empty()
    write_report(page, empty_frame(), title="t", provenance={})
    with pytest.raises(GradreelError, match="holds something else"):
        FrameWriter(page)


def test_a_file_of_the_same_kind_or_an_empty_one_is_replaced(tmp_path: Path) -> None:
    frame, page = tmp_path / "a.parquet", tmp_path / "a.html"
    for _ in range(2):
        FrameWriter(frame).close()
        write_report(page, empty_frame(), title="t", provenance={})
    empty = tmp_path / "b.parquet"
    empty.touch()
    FrameWriter(empty).close()
    assert read_frame(empty).is_empty()


def test_what_is_no_ordinary_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused(pipe, "no ordinary file")
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["x" * 300, "script/under.parquet"])
def test_a_path_that_cannot_be_written_is_told_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "script").write_text("text")
    refused(tmp_path / name, "cannot write")
