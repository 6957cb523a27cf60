"""Where runs are kept: one folder per run, named by what defines it, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from ablations.runner._spec import Finished
from traces.errors import GradreelError

FRAME, RUN = "frame.parquet", "run.json"
_ASIDE = ".making-"


def finished(root: str | Path, run_id: str) -> Finished | None:
    """The run `run_id` of `root`, None where it is not there or not complete."""
    file = Path(root) / run_id / RUN
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        found = Finished(**{**values, "window_losses": tuple(values["window_losses"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise GradreelError(
            f"{str(file)!r} is damaged ({type(error).__name__}); remove its folder to make it anew"
        ) from None
    if found.id != run_id:
        raise GradreelError(f"{str(file)!r} says it is run {found.id}; remove its folder to make it anew")
    return found


def read_run_frame(root: str | Path, run_id: str) -> pl.DataFrame:
    """The rows of a finished run."""
    from toolkit.frame import read_frame

    return read_frame(Path(root) / run_id / FRAME)


def put_run(root: str | Path, run: Finished, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a run: both files aside, synced, then the folder renamed, so that it exists when its last file does.

    A run that is there already is left as it is. Raises OSError or GradreelError where the disk refuses.
    """
    from toolkit.frame import FrameWriter

    root = Path(root)
    aside = root / f"{_ASIDE}{run.id}-{os.getpid()}"
    try:
        aside.mkdir(parents=True)
        with FrameWriter(aside / FRAME) as writer:
            writer.write(rows)
        (aside / RUN).write_text(json.dumps(asdict(run), indent=1) + "\n", encoding="utf-8")
        for place in (aside / FRAME, aside / RUN, aside):
            _sync(place)
        try:
            os.rename(aside, root / run.id)
        except OSError:
            if finished(root, run.id) is None:
                raise
        _sync(root)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_remains(root: str | Path) -> None:
    """Remove what interrupted writing left behind."""
    for aside in Path(root).glob(f"{_ASIDE}*"):
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def locked(root: str | Path) -> Iterator[None]:
    """Keep others out of `root` while runs are made in it; a second one is a GradreelError. The lock dies with us."""
    folder = Path(root)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise GradreelError(
            f"cannot keep runs in {str(folder)!r}: {error.strerror or error}; give another folder with --out"
        ) from None
    try:
        try:
            import fcntl
        except ImportError:  # a system without it: nobody is kept out
            yield
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise GradreelError(
                f"{str(folder)!r} is being filled by another process; wait for it, or give another folder with --out"
            ) from None
        yield
    finally:
        os.close(handle)


def write_aside(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        aside.write_text(text, encoding="utf-8")
        _sync(aside)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return
    with suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
