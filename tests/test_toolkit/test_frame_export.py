"""A Frame written for other tools: what they would read back."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from toolkit.frame import FrameWriter, read_frame, read_provenance
from toolkit.frame_export import export_frame, scalars
from traces.errors import GradreelError


def frame() -> pl.DataFrame:
    with FrameWriter(constants={"run": "abc", "seed": 0}) as writer:
        for recipe in ("adamw", "mesh"):
            for step in (1, 2, 3):
                row = {"recipe": recipe, "step": step, "param": "w", "role": "routed_expert", "unit": "1"}
                writer.write([{**row, "metric": "update_cos", "lag": 1, "value": step / 4, "flag": "p50"}])
                writer.write([{**row, "metric": "grad_norm", "value": 2.0 * step, "expert": 3}])
            writer.write([{"recipe": recipe, "step": 1, "metric": "loss", "value": float("nan"), "unit": "nats"}])
        return writer.close().collect()


def test_csv_and_parquet_hold_every_row(tmp_path: Path) -> None:
    table = frame()
    assert export_frame(table, tmp_path / "f.csv", "csv").rows == table.height
    back = pl.read_csv(tmp_path / "f.csv")
    assert back["value"].to_list() == table["value"].to_list()
    export_frame(table, tmp_path / "f.parquet", "parquet", provenance={"trace": "x"})
    assert read_frame(tmp_path / "f.parquet").equals(table)
    assert read_provenance(tmp_path / "f.parquet") == {"trace": "x"}


def test_scalars_leave_out_rows_per_expert_and_count_them() -> None:
    runs, left_out = scalars(frame())
    assert left_out == 6
    assert [of["recipe"] for of, _ in runs] == ["adamw", "mesh"]
    assert runs[0][1].rows() == [("update_cos_lag1_p50/w", step, step / 4) for step in (1, 2, 3)]


def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="event files need tensorboardX, of the extra `tensorboard`")
    from tensorboardX.proto.event_pb2 import Event

    assert export_frame(frame(), tmp_path / "events", "tensorboard").rows == 6
    found = {}
    for file in (tmp_path / "events").glob("*/events*"):
        data, at = file.read_bytes(), 0
        while at < len(data):  # records: length u64, its checksum u32, bytes, their checksum u32
            length = struct.unpack_from("<Q", data, at)[0]
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found.update({(file.parent.name, v.tag, event.step): v.simple_value for v in event.summary.value})
            at += 16 + length
    tag = "update_cos_lag1_p50/w"
    assert found == {(f"{r}-seed0-abc", tag, s): s / 4 for r in ("adamw", "mesh") for s in (1, 2, 3)}
    with pytest.raises(GradreelError, match="name a new folder"):
        export_frame(frame(), tmp_path / "events", "tensorboard")


def test_weights_and_biases_gets_each_run_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def init(*, project: str, name: str, config: dict[str, Any]) -> SimpleNamespace:
        calls.append(("init", project, name, config["recipe"]))
        return SimpleNamespace(log=lambda data, step: calls.append((data, step)), finish=lambda: calls.append("finish"))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    export_frame(frame(), "moe", "wandb")
    tag = "update_cos_lag1_p50/w"
    half = len(calls) // 2
    assert calls[:half] == [
        ("init", "moe", "adamw-seed0-abc", "adamw"),
        *[({tag: s / 4}, s) for s in (1, 2, 3)],
        "finish",
    ]
    assert calls[half][3] == "mesh"
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(GradreelError, match=r"gradreel\[wandb\]"):
        export_frame(frame(), "moe", "wandb")


def test_a_frame_is_told_from_a_trace_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ablations.cli import build_app
    from toolkit.frame import write_frame
    from traces.console import run

    write_frame(tmp_path / "frame.parquet", frame())
    app = build_app()
    assert run(app, ["export", str(tmp_path), str(tmp_path / "out.csv")]) == 0
    assert "14 rows" in capsys.readouterr().out
    assert run(app, ["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert run(app, ["export", str(tmp_path), str(tmp_path / "out"), "--to", "megatron"]) == 2
    assert "unknown kind of file 'megatron'" in capsys.readouterr().err
