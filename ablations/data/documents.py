"""Text of the user's own, document by document: files, JSON lines, parquet, and Hugging Face data sets as a stream.

A document goes to training or to validation by its own hash, so equal documents never stand on both sides, and a text
that grows keeps its split. Reading stops at `max_bytes`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from traces.errors import GradreelError

#: One document, and one line of JSON, at most.
MOST_DOCUMENT_BYTES = 64 << 20


def text_files(path: str) -> Iterator[str]:
    """Every file of the folder `path` as a document, in the order of names; one file is cut at its blank lines."""
    place = Path(path)
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.is_file())
        if not files:
            raise GradreelError(f"text folder {path!r} holds no file; give one with text files")
        for file in files:
            yield _decoded(_read(file), file)
        return
    for part in _decoded(_read(place), place).split("\n\n"):
        if part.strip():
            yield part + "\n\n"


def json_lines(path: str, field: str = "text") -> Iterator[str]:
    """`field` of every line of a file of JSON objects."""
    try:
        file = open(path, "rb")  # noqa: SIM115  (an error to open is not one to read)
    except OSError as error:
        raise _unreadable(path, error) from None
    with file:
        number = 0
        while line := file.readline(MOST_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > MOST_DOCUMENT_BYTES:
                raise GradreelError(f"{path}, line {number}: longer than the {MOST_DOCUMENT_BYTES} bytes allowed")
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise GradreelError(f"{path}, line {number}: not JSON ({error}); give one object a line") from None
            yield _of_field(value, field, f"{path}, line {number}")


def parquet(path: str, column: str = "text") -> Iterator[str]:
    """`column` of every row of a parquet file, or of every parquet file of a folder in the order of names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = Path(path)
    files = sorted(place.glob("*.parquet")) if place.is_dir() else [place]
    if not files:
        raise GradreelError(f"folder {path!r} holds no .parquet file")
    for file in files:
        try:
            opened = pq.ParquetFile(file)
            names = opened.schema_arrow.names
            if column not in names:
                raise GradreelError(f"{file} has no column {column!r}; columns: {', '.join(names)}")
            for batch in opened.iter_batches(batch_size=64, columns=[column]):
                for value in batch.column(0).to_pylist():
                    yield _of_field({column: value}, column, str(file))
        except OSError as error:
            raise _unreadable(str(file), error) from None
        except pa.ArrowException as error:
            raise GradreelError(f"{file} cannot be read as parquet: {str(error).splitlines()[0]}") from None


def huggingface(path: str, name: str | None = None, split: str = "train", column: str = "text") -> Iterator[str]:
    """`column` of a Hugging Face data set, streamed: a name on the hub, or a local builder such as "json" or "text"."""
    try:
        import datasets
    except ImportError:
        raise GradreelError("source huggingface needs datasets; install it: pip install 'gradreel[data]'") from None
    data_files = None
    if Path(path).is_file():  # a local file, by its kind
        kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".csv": "csv"}
        path, data_files = kinds.get(Path(path).suffix, "text"), path
    try:
        rows = datasets.load_dataset(path, name, split=split, data_files=data_files, streaming=True)
        for row in rows:
            yield _of_field(row, column, f"data set {path}")
    except GradreelError:
        raise
    except Exception as error:  # each of its back ends raises its own
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise GradreelError(f"data set {path!r}, config {name!r}, split {split!r} cannot be read: {what}") from None


READERS = {"text": text_files, "jsonl": json_lines, "parquet": parquet, "huggingface": huggingface}


def bounded(documents: Iterable[str], most: int) -> Iterator[bytes]:
    """The documents as UTF-8, until `most` bytes are reached; the one that passes it is left out."""
    total = 0
    for document in documents:
        content = document.encode("utf-8", errors="surrogatepass")
        total += len(content)
        if total > most:
            return
        yield content


def _of_field(row: Any, field: str, where: str) -> str:
    if not isinstance(row, Mapping) or field not in row:
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise GradreelError(f"{where}: no field {field!r}; there is: {has}")
    value = row[field]
    if not isinstance(value, str):
        raise GradreelError(f"{where}: field {field!r} is a {type(value).__name__}; give one of text")
    return value


def _read(file: Path) -> bytes:
    try:
        with open(file, "rb") as opened:
            content = opened.read(MOST_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise _unreadable(str(file), error) from None
    if len(content) > MOST_DOCUMENT_BYTES:
        raise GradreelError(
            f"text file {str(file)!r} is over the {MOST_DOCUMENT_BYTES} bytes that one file may have; split it"
        )
    return content


def _decoded(content: bytes, file: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GradreelError(f"text file {str(file)!r} is not UTF-8 at byte {error.start}; convert it") from None


def _unreadable(path: str, error: OSError) -> GradreelError:
    return GradreelError(f"data {path!r} cannot be read: {error.strerror or error}")
