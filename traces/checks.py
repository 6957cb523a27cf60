"""What a recording refuses before it begins, and after its first step: mistakes are told early and by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from traces.errors import GradreelError, TraceError
from traces.record_at import RecordAt
from traces.views import ParamInfo

STREAMS = ("gradient", "grad_buffer", "weight", "routing", "scores", "logits", "scalars")


def check_types(path: Any, model: Any, at: Any, roles: Any) -> None:
    """Refuse arguments of another kind, most often given in another order."""
    order = "write Recorder(path, model, optimizer, at=RecordAt(...))"
    if not isinstance(path, (str, Path, type(None))) or "\0" in str(path):
        raise GradreelError(f"path {path!r} is no path of a folder; {order}")
    if not isinstance(model, nn.Module):
        raise GradreelError(f"model is a {type(model).__name__}, not a torch.nn.Module; {order}")
    if not isinstance(at, (RecordAt, type(None))):
        raise GradreelError(f"at is a {type(at).__name__}, not a RecordAt; {order}")
    if not isinstance(roles, (Mapping, type(None))):
        raise GradreelError(f"roles is a {type(roles).__name__}; write roles={{'*.gate.*': 'router'}}")


def check_arguments(path: Path | None, at: RecordAt, on_step: Any, statistics: Any) -> None:
    """Refuse what cannot be recorded, a path that is taken, and a run of several processes."""
    if path is None and on_step is None:
        raise GradreelError("Recorder(None, ...) records nowhere; give a path, or on_step=f to receive the steps")
    for stream in at.streams:
        if stream not in STREAMS:
            raise GradreelError(f"stream {stream!r} cannot be recorded yet; choose among {', '.join(STREAMS)}")
    if statistics is not None:
        raise GradreelError("statistics= cannot be recorded yet; leave it out")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        if world > 1:
            raise GradreelError(f"a run of {world} processes cannot be recorded yet; record one process")
    try:
        taken = path is not None and (path.is_file() or (path.is_dir() and any(path.iterdir())))
    except OSError as error:
        raise GradreelError(f"{str(path)[:100]!r} cannot be used: {error.strerror or error}; choose another") from None
    if path is not None and taken:
        holds = "already holds a trace" if (path / "header.json").exists() else "is not an empty folder"
        raise TraceError(f"{str(path)!r} {holds}; choose another path or remove it first")


def choose_parameters(
    infos: Sequence[ParamInfo], parameters: Mapping[str, nn.Parameter], at: RecordAt
) -> dict[str, nn.Parameter]:
    """The trainable parameters whose role is recorded, by name; all on one device, which the copies wait for."""
    trained = [info for info in infos if parameters[info.name].requires_grad]
    wanted = {info.name: parameters[info.name] for info in trained if at.records_role(info.role)}
    if not wanted:
        there = ", ".join(sorted({info.role for info in trained})) or "nothing"
        raise GradreelError(
            f"no trainable parameter has a role in {at.roles}; this model trains {there}; name some of these in "
            "RecordAt(roles=...)"
        )
    for name, parameter in wanted.items():
        if hasattr(parameter, "to_local"):
            raise GradreelError(f"parameter {name!r} is sharded (DTensor), which cannot be recorded yet; unshard it")
    devices = sorted({str(parameter.device) for parameter in wanted.values()})
    if len(devices) > 1:
        raise GradreelError(
            f"the parameters to record lie on {', '.join(devices)}, which cannot be recorded yet; put the model on one "
            "device, or name roles of one device in RecordAt(roles=...)"
        )
    for info in trained:
        if info.name in wanted and info.expert_axis is not None and info.num_experts is not None:
            at.choose_experts(info.num_experts)  # an id that is no expert is said now, not at each step
    return wanted


def check_gradients(absent: Sequence[str], recorded: Sequence[ParamInfo]) -> None:
    """Refuse a first step in which no recorded expert has a gradient: a trace of nothing helps nobody."""
    experts = [info.name for info in recorded if info.role == "routed_expert"]
    if experts and set(experts) <= set(absent):
        raise GradreelError(
            f"parameter {experts[0]!r} and all other routed experts have no gradient at the first step; call backward "
            "before optimizer.step(), or record other roles with RecordAt(roles=...)"
        )
