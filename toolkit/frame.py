"""The one table: every measurement of every run, replay and ablation, in long form.

A Frame is a polars DataFrame with the columns of `SCHEMA`. It is written to parquet row groups while it is produced,
so a long replay holds at most one row group in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from traces.errors import GradreelError, unknown
from traces.views import ROLES

#: Why a value looks as it does. Empty: an ordinary value. `mean` .. `p90`: a summary over experts.
FLAGS = (
    "",
    "mean",
    "p10",
    "p50",
    "p90",
    "nonfinite",
    "undefined",
    "diverged",
    "skipped",
    "zombie",
    "failed",
)

SCHEMA: dict[str, Any] = {
    "run": pl.String,
    "arm": pl.String,
    "seed": pl.Int64,
    "recipe": pl.String,
    "step": pl.Int64,
    "param": pl.String,
    "role": pl.Enum(ROLES),
    "layer": pl.Int32,
    "expert": pl.Int32,
    "metric": pl.String,
    "lag": pl.Int32,
    "value": pl.Float64,
    "support": pl.Float64,
    "flag": pl.Enum(FLAGS),
    "unit": pl.String,
}

#: The sentence that every replay's documentation and report carries.
OPEN_LOOP_NOTE = "Replay is open-loop: it compares updates, not losses"

ROW_GROUP_ROWS = 65_536
#: A file that declares more rows is read lazily by the caller, never at once by `read_frame`.
MAX_ROWS = 50_000_000
_PROVENANCE_KEY = "gradreel.provenance"
_PARQUET_MAGIC = b"PAR1"
_CHOICES: dict[str, frozenset[str | None]] = {"role": frozenset(ROLES) | {None}, "flag": frozenset(FLAGS)}


def check_target(path: Path, kind: str, beginnings: tuple[bytes, ...]) -> None:
    """Refuse to write `kind` over anything but a file of its own kind: one that is empty or starts as given.

    A folder, a device, a file inside a trace and a file of another kind raise `GradreelError`.
    """
    place = f"cannot write {kind} to {str(path)!r}"
    try:
        if path.is_dir():
            raise GradreelError(f"{place}: it is a folder; give a file name")
        if any((folder / "rank-00000").is_dir() for folder in path.absolute().parents[:2]):
            raise GradreelError(f"{place}: it lies inside a trace, whose files never change; name one outside")
        if not path.exists():
            return
        if not path.is_file():
            raise GradreelError(f"{place}: it is no ordinary file; give another name")
        with path.open("rb") as file:
            head = file.read(256).lower()
    except OSError as error:
        raise GradreelError(f"{place}: {error.strerror or error}; give another name") from None
    if head and not head.lstrip().startswith(tuple(each.lower() for each in beginnings)):
        raise GradreelError(f"{place}: it holds something else, which would be lost; remove it or give another name")


def empty_frame() -> pl.DataFrame:
    """A Frame without rows."""
    return pl.DataFrame(schema=SCHEMA)


class FrameWriter:
    """Writes rows into a Frame while they are produced.

    With `path`, row groups go to a parquet file beside it (`.partial`), which takes the name `path` on `close`; so at
    most `row_group_rows` rows are in memory, and an interrupted run leaves no half file under the final name. With
    `path` None the Frame is kept in memory. `constants` fills columns that a row leaves out (run, arm, seed, recipe).

    A value that is NaN or infinite becomes null; its flag says `nonfinite` unless the row has a flag already.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        constants: Mapping[str, Any] | None = None,
        row_group_rows: int = ROW_GROUP_ROWS,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.rows_written = 0
        self._constants = dict.fromkeys(SCHEMA) | {"flag": ""} | dict(constants or {})
        _refuse_unknown_columns(self._constants)
        self._row_group_rows = row_group_rows
        self._columns: dict[str, list[Any]] = {name: [] for name in SCHEMA}
        self._blocks: list[pl.DataFrame] = []
        self._parquet: Any = None
        self._closed = False
        if self.path is not None:
            check_target(self.path, "a frame", (_PARQUET_MAGIC,))
            try:  # made now: a path that cannot be written is told before hours of work
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._partial.touch()
            except OSError as error:
                raise GradreelError(
                    f"cannot write a frame to {str(self.path)!r}: {error.strerror or error}; "
                    "name a file in a folder you may write"
                ) from None

    @property
    def _partial(self) -> Path:
        assert self.path is not None
        return self.path.with_name(self.path.name + ".partial")

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows; each is a mapping from columns of `SCHEMA` to values, and may leave columns out (null)."""
        if self._closed:
            raise GradreelError("the frame is closed; rows must be written before close()")
        for row in rows:
            self._add(row)
            if len(self._columns["value"]) >= self._row_group_rows:
                self._flush()

    def _add(self, row: Mapping[str, Any]) -> None:
        full = {**self._constants, **row}
        if len(full) != len(SCHEMA):
            _refuse_unknown_columns(full)
        full["flag"] = full["flag"] or ""
        for column in ("value", "support"):
            number = full[column]
            if number is not None and not math.isfinite(number):
                full[column] = None
                full["flag"] = full["flag"] or "nonfinite"
        for column, choices in _CHOICES.items():
            if full[column] not in choices:
                raise unknown(column, str(full[column]), (c for c in choices if c))
        for name, values in self._columns.items():
            values.append(full[name])

    def _flush(self) -> None:
        block = pl.DataFrame(self._columns, schema=SCHEMA)
        self._columns = {name: [] for name in SCHEMA}
        self.rows_written += block.height
        if self.path is None:
            self._blocks.append(block)
            return
        table = block.to_arrow()
        if self._parquet is None:
            import pyarrow.parquet as pq

            self._parquet = pq.ParquetWriter(self._partial, table.schema, compression="zstd")
        self._parquet.write_table(table)

    def close(self, provenance: Mapping[str, Any] | None = None) -> pl.LazyFrame:
        """Finish, store `provenance` (JSON) inside the file, and return the Frame lazily. Closing twice is harmless."""
        if not self._closed:
            if self._columns["value"] or (self.path is not None and self._parquet is None):
                self._flush()
            self._closed = True
            if self.path is not None:
                self._parquet.add_key_value_metadata({_PROVENANCE_KEY: json.dumps(provenance or {}, default=str)})
                self._parquet.close()
                os.replace(self._partial, self.path)
        if self.path is not None:
            return pl.scan_parquet(self.path)
        return pl.concat([empty_frame(), *self._blocks]).lazy()

    def abandon(self) -> None:
        """Drop what was written; nothing appears under `path`."""
        self._closed = True
        try:
            if self._parquet is not None:
                self._parquet.close()  # writes a footer, which a full disk refuses
        except OSError:
            pass
        finally:
            if self.path is not None:
                self._partial.unlink(missing_ok=True)

    def __enter__(self) -> FrameWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            self.abandon()


def write_frame(path: str | Path, frame: pl.DataFrame, provenance: Mapping[str, Any] | None = None) -> Path:
    """Write a whole Frame at once; its columns must be those of `SCHEMA`."""
    checked = conform(frame, "the frame")
    with FrameWriter(path) as writer:
        for block in checked.iter_slices(ROW_GROUP_ROWS):
            writer.write(block.iter_rows(named=True))
        writer.close(provenance)
    return Path(path)


def read_frame(path: str | Path) -> pl.DataFrame:
    """Read a Frame from parquet, checked against `SCHEMA`; anything else is a GradreelError of one line."""
    metadata = _footer(path)
    if metadata.num_rows > MAX_ROWS:
        raise GradreelError(
            f"{str(path)!r} declares {metadata.num_rows} rows, more than {MAX_ROWS}; read it with polars.scan_parquet"
        )
    names = set(metadata.schema.to_arrow_schema().names)
    lacking = [name for name in SCHEMA if name not in names]
    if lacking:
        raise GradreelError(f"{str(path)!r} is no frame: it lacks the columns {', '.join(lacking)}")
    try:
        frame = pl.read_parquet(path, columns=list(SCHEMA))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # polars panics with a BaseException on some damaged files
        raise GradreelError(f"{str(path)!r} is a damaged parquet file: {_first_line(error)}") from error
    if frame.height != metadata.num_rows:
        raise GradreelError(f"{str(path)!r} is damaged: {frame.height} rows read, {metadata.num_rows} declared")
    return conform(frame, repr(str(path)))


def read_provenance(path: str | Path) -> dict[str, Any]:
    """The provenance stored inside a Frame file; empty where there is none."""
    text = (_footer(path).metadata or {}).get(_PROVENANCE_KEY.encode())
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise GradreelError(f"{str(path)!r} holds a damaged provenance: {_first_line(error)}") from error
    return found if isinstance(found, dict) else {}


def conform(frame: pl.DataFrame, where: str) -> pl.DataFrame:
    """`frame` with exactly the columns and types of `SCHEMA`; else a GradreelError that names `where`."""
    lacking = [name for name in SCHEMA if name not in frame.columns]
    if lacking:
        raise GradreelError(f"{where} is no frame: it lacks the columns {', '.join(lacking)}")
    columns = []
    for name, kind in SCHEMA.items():
        try:
            columns.append(frame.get_column(name).cast(kind, strict=True))
            if name == "flag":
                columns[-1] = columns[-1].fill_null("")
        except pl.exceptions.PolarsError as error:
            raise GradreelError(f"{where}: column {name} is not {kind}: {_first_line(error)}") from error
    return pl.DataFrame(columns)


def _footer(path: str | Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not Path(path).is_file():
        what = "is no ordinary file" if Path(path).exists() else "does not exist"
        raise GradreelError(f"frame {str(path)!r} {what}; give the parquet file that replay wrote")
    try:
        with pq.ParquetFile(path) as file:
            return file.metadata
    except (pa.ArrowException, OSError) as error:
        raise GradreelError(f"{str(path)!r} is no parquet file: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _refuse_unknown_columns(row: Mapping[str, Any]) -> None:
    for name in row:
        if name not in SCHEMA:
            raise unknown("frame column", name, SCHEMA)
