"""Reels of runs: a run made once more while it is recorded, and runs that train on recorded routing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablations.runner._spec import RunSpec
from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import nn

    from ablations.train import TrainResult
    from traces.record_at import RecordAt

_REELS = ".reels"


def reel_path(root: str | Path, run_id: str) -> Path:
    """Where the routing of the run `run_id` is kept."""
    return Path(root) / _REELS / f"{run_id}.trace"


def record_run(
    spec: RunSpec, path: str | Path, at: RecordAt, *, progress: Callable[[int], None] | None = None
) -> TrainResult:
    """Make the run `spec` once more and record it into the new trace `path`; nothing is evaluated or kept but that.

    The same definition gives the same run, so what is recorded belongs to the run that was compared.
    """
    import torch

    from ablations.data import open_data
    from ablations.models import build_model
    from ablations.runner._execute import Batches
    from ablations.train import Schedule, StepReport, train
    from toolkit.optim import make_optimizer
    from toolkit.variants import recipe
    from traces.recorder import Recorder

    text = open_data(spec.data_spec().source, spec.data_spec().options)
    torch.manual_seed(spec.seed)
    model, call = build_model(spec.model_config())
    model.to(spec.device)
    built = recipe(spec.recipe, lr=spec.lr)
    optimizer = make_optimizer(model, built, seed=spec.seed, hidden_momentum="apart")

    def after(report: StepReport) -> None:
        if progress is not None:
            progress(report.step)

    with Recorder(path, model, optimizer, at=at, notify=lambda _: None) as reel:
        return train(
            model,
            optimizer,
            Batches(text, spec),
            spec.steps,
            schedule=Schedule(spec.steps, spec.warmup, spec.floor, spec.schedule),
            clip=spec.clip,
            accumulation=spec.accumulation,
            call=call,
            on_step=lambda report: reel.log(loss=report.loss, grad_norm=report.grad_norm),
            progress=after,
        )


def ensure_routing(spec: RunSpec, root: str | Path) -> Path:
    """The trace with the routing of the run `spec`, recorded now where it is missing or was not finished."""
    from traces.errors import TraceError
    from traces.reader import open_trace
    from traces.record_at import RecordAt

    path = reel_path(root, spec.id)
    try:
        if path.exists() and open_trace(path).finished:
            return path
    except TraceError:
        pass
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    record_run(spec, path, RecordAt(streams=("routing", "scalars"), budget=None))
    return path


def routed_as(spec: RunSpec, root: str | Path, model: nn.Module, optimizer: Any) -> AbstractContextManager[Any]:
    """Within it `model` trains on the routing that `spec` names, or on its own."""
    if spec.routing is None:
        return nullcontext()
    from ablations.routing_replay import RoutingReplay

    path = reel_path(root, spec.routing)
    if not path.exists():
        raise GradreelError(f"the routing of run {spec.routing} is not recorded in {str(root)!r}; record it first")
    return RoutingReplay(model, path, optimizer)
