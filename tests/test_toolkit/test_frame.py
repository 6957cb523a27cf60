"""The Frame: written in row groups, read back checked, nothing half-written under the final name."""

import math

import polars as pl
import pyarrow.parquet as pq
import pytest

from toolkit.frame import (
    SCHEMA,
    FrameWriter,
    conform,
    empty_frame,
    read_frame,
    read_provenance,
    write_frame,
)
from traces.errors import GradreelError


def rows(count):
    for i in range(count):
        yield {"step": i, "param": f"w{i % 3}", "role": "router", "metric": "update_rms", "value": i / 2, "unit": "1"}


@pytest.mark.parametrize("on_disk", [True, False])
def test_round_trip(tmp_path, on_disk):
    path = tmp_path / "new" / "frame.parquet" if on_disk else None
    with FrameWriter(path, constants={"run": "r", "seed": 3}, row_group_rows=10) as writer:
        writer.write(rows(25))
        frame = writer.close({"trace": "abc"}).collect()
    assert frame.schema == pl.Schema(SCHEMA)
    assert frame["value"].to_list() == [i / 2 for i in range(25)]
    assert frame["run"].unique().to_list() == ["r"]
    assert frame["flag"].unique().to_list() == [""]
    assert frame["lag"].null_count() == 25
    if on_disk:
        assert read_frame(path).equals(frame)
        assert read_provenance(path) == {"trace": "abc"}
        assert pq.ParquetFile(path).metadata.num_row_groups == 3
        assert [p.name for p in path.parent.iterdir()] == ["frame.parquet"]


def test_row_groups_are_written_before_close(tmp_path):
    writer = FrameWriter(tmp_path / "f.parquet", row_group_rows=10)
    writer.write(rows(35))
    assert writer.rows_written == 30
    assert len(writer._columns["value"]) == 5
    assert not (tmp_path / "f.parquet").exists()
    writer.close()


def test_empty_frame_is_read_as_empty(tmp_path):
    FrameWriter(tmp_path / "f.parquet").close()
    frame = read_frame(tmp_path / "f.parquet")
    assert frame.height == 0
    assert frame.schema == empty_frame().schema
    assert read_provenance(tmp_path / "f.parquet") == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_becomes_null_and_is_flagged(value):
    writer = FrameWriter()
    writer.write([{"value": value}, {"value": value, "flag": "diverged"}, {"value": 1.0, "support": value}])
    frame = writer.close().collect()
    assert frame["value"].to_list() == [None, None, 1.0]
    assert frame["support"].to_list() == [None, None, None]
    assert frame["flag"].to_list() == ["nonfinite", "diverged", "nonfinite"]


@pytest.mark.parametrize(
    ("row", "text"),
    [({"roll": 1}, "'roll'; did you mean 'role'?"), ({"role": "routr"}, "'routr'"), ({"flag": "odd"}, "'odd'")],
)
def test_wrong_rows_are_refused(row, text):
    with pytest.raises(GradreelError, match=text.replace("?", r"\?")):
        FrameWriter().write([row])


def write_and_fail(path):
    with FrameWriter(path, row_group_rows=2) as writer:
        writer.write(rows(7))
        raise RuntimeError("stop")


def test_a_failing_run_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError):
        write_and_fail(tmp_path / "f.parquet")
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_survives_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "f.parquet"
    write_frame(path, conform(pl.DataFrame(list(rows(3)), schema=SCHEMA), "x"))
    with pytest.raises(RuntimeError):
        write_and_fail(path)
    assert read_frame(path).height == 3


def test_hostile_files_are_one_line_errors(tmp_path):
    good = tmp_path / "good.parquet"
    with FrameWriter(good) as writer:
        writer.write(rows(500))
    payload = good.read_bytes()
    cases = {
        "missing.parquet": None,
        "empty.parquet": b"",
        "text.parquet": b"step,value\n1,2\n",
        "cut.parquet": payload[: len(payload) // 2],
        "tailless.parquet": payload[:-4],
        "zeroed.parquet": payload[:40] + bytes(400) + payload[440:],
    }
    for name, content in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(GradreelError) as caught:
            read_frame(tmp_path / name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
    pl.DataFrame({"step": [1]}).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(GradreelError, match="lacks the columns run"):
        read_frame(tmp_path / "other.parquet")
    with pytest.raises(GradreelError, match="is a folder"):
        FrameWriter(tmp_path)


def test_columns_of_another_type_are_cast_or_refused():
    frame = conform(pl.DataFrame(list(rows(3)), schema=SCHEMA), "x")
    loose = frame.with_columns(pl.col("role").cast(pl.String), pl.col("step").cast(pl.Int16), pl.lit(1).alias("more"))
    assert conform(loose, "x").equals(frame)
    with pytest.raises(GradreelError, match="column role"):
        conform(frame.with_columns(pl.lit("boss").alias("role")), "x")


def test_a_disk_that_is_full_at_the_footer_leaves_no_partial_file(tmp_path, monkeypatch):
    writer = FrameWriter(tmp_path / "a.parquet", row_group_rows=1)
    writer.write([{"metric": "m", "value": 1.0}])

    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer._parquet, "close", full)
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
