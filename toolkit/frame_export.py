"""A Frame as the files of other tools: CSV, parquet, TensorBoard's event files, a Weights & Biases run.

Scalars of TensorBoard and Weights & Biases are the rows with a step and a value. Rows per expert are left out there and
counted: each would be a chart of its own. Every combination of run, arm, seed and recipe is a run of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from toolkit.frame import SCHEMA, check_target, write_frame
from traces.errors import GradreelError, unknown

_RUN = ("run", "arm", "seed", "recipe")


@dataclass(frozen=True)
class Exported:
    """What was written: `place` it lies at, how many `rows`, and how many per-expert rows were `left_out`."""

    place: str
    rows: int
    left_out: int = 0


def export_frame(
    frame: pl.DataFrame, target: str | Path, kind: str, *, provenance: Mapping[str, Any] | None = None
) -> Exported:
    """Write `frame` to `target` as `csv`, `parquet`, `tensorboard` (a new folder) or `wandb` (the project's name).

    Raises GradreelError for an unknown kind, a target that must not be overwritten, or a package that is missing.
    """
    if kind not in KINDS:
        raise unknown("kind of file", kind, KINDS)
    return KINDS[kind](frame, target, dict(provenance or {}))


def tag(metric: str, role: str | None, param: str | None, layer: int | None, lag: int | None, flag: str) -> str:
    """The name of a scalar: metric, lag and summary, then where it was measured, as in `grad_cos_lag1_p50/PARAM`."""
    name = metric + (f"_lag{lag}" if lag is not None else "") + (f"_{flag}" if flag else "")
    where = param or (f"layer_{layer}" if layer is not None else role)
    return f"{name}/{where}" if where else name


def scalars(frame: pl.DataFrame) -> tuple[list[tuple[dict[str, Any], pl.DataFrame]], int]:
    """The runs of `frame`, each with its scalars (tag, step, value) in step order, and the number of rows left out."""
    known = frame.filter(pl.col("step").is_not_null(), pl.col("value").is_not_null())
    kept = known.filter(pl.col("expert").is_null()).sort("step", maintain_order=True)
    runs = []
    for part in kept.partition_by(_RUN, maintain_order=True):
        columns = ("metric", "role", "param", "layer", "lag", "flag")
        tags = [tag(*row) for row in part.select(columns).iter_rows()]
        of = dict(zip(_RUN, part.select(_RUN).row(0), strict=True))
        runs.append((of, part.select(pl.Series("tag", tags), "step", "value")))
    return runs, known.height - kept.height


def _csv(frame: pl.DataFrame, target: str | Path, provenance: dict[str, Any]) -> Exported:
    path = Path(target)
    check_target(path, "a CSV", (",".join(SCHEMA).encode(),))
    with _telling(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.write_csv(path)
    return Exported(str(path), frame.height)


def _parquet(frame: pl.DataFrame, target: str | Path, provenance: dict[str, Any]) -> Exported:
    return Exported(str(write_frame(target, frame, provenance)), frame.height)


def _tensorboard(frame: pl.DataFrame, target: str | Path, provenance: dict[str, Any]) -> Exported:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise GradreelError("event files need tensorboardX; pip install 'gradreel[tensorboard]'") from None
    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise GradreelError(f"cannot write event files to {str(folder)!r}: it is there already; name a new folder")
    runs, left_out = scalars(frame)
    with _telling(folder):
        for of, rows in runs:
            writer = SummaryWriter(str(folder / _name(of)), write_to_disk=True)
            for name, step, value in rows.iter_rows():
                writer.add_scalar(name, value, step)
            writer.close()
    return Exported(str(folder), sum(rows.height for _, rows in runs), left_out)


def _wandb(frame: pl.DataFrame, target: str | Path, provenance: dict[str, Any]) -> Exported:
    try:
        import wandb
    except ImportError:
        raise GradreelError("Weights & Biases needs its package; pip install 'gradreel[wandb]'") from None
    runs, left_out = scalars(frame)
    for of, rows in runs:
        config = {**{key: value for key, value in of.items() if value is not None}, "provenance": provenance}
        run = wandb.init(project=str(target), name=_name(of), config=config)
        # A step may come only once, so all scalars of a step go together.
        for (step,), part in rows.partition_by("step", as_dict=True, maintain_order=True).items():
            run.log(dict(zip(part["tag"], part["value"], strict=True)), step=step)
        run.finish()
    return Exported(f"project {target}", sum(rows.height for _, rows in runs), left_out)


KINDS: dict[str, Callable[[pl.DataFrame, str | Path, dict[str, Any]], Exported]] = {
    "csv": _csv,
    "parquet": _parquet,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def _name(of: Mapping[str, Any]) -> str:
    """A run's name, which is also a folder's: letters, digits and a few signs."""
    words = [of["arm"], of["recipe"] if of["recipe"] != of["arm"] else None]
    words = [word for word in words if word] or ["recorded"]
    words += [f"seed{of['seed']}"] if of["seed"] is not None else []
    text = "-".join([*words, str(of["run"] or "")[:12]])
    return re.sub(r"[^A-Za-z0-9_.+()=,-]", "_", text).strip(".-") or "run"


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """An error of the disk in one line."""
    try:
        yield
    except OSError as error:
        raise GradreelError(f"cannot write to {str(path)!r}: {error.strerror or error}; name another place") from None
