"""What a recording refuses before it begins, and after its first step: mistakes are told early and by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from traces._store import is_url, names_in
from traces.errors import GradreelError, TraceError
from traces.layouts import MoELayer, find_moe_layers
from traces.record_at import RecordAt
from traces.schema import read_header
from traces.sharing import Sharing, process_place
from traces.views import ParamInfo


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


def check_arguments(path: Path | None, at: RecordAt, on_step: Any, statistics: Any, probe: Any) -> None:
    """Refuse what cannot be recorded, and a path that is taken."""
    if path is None and on_step is None:
        raise GradreelError("Recorder(None, ...) records nowhere; give a path, or on_step=f to receive the steps")
    _check_streams(path, at, statistics, probe)
    if path is not None:
        _check_path(path)


def _check_path(path: Path) -> None:
    """Refuse a path that is taken. Of a run of several processes the others may have begun to write."""
    rank, world = process_place()
    launched = int(os.environ["WORLD_SIZE"]) if os.environ.get("WORLD_SIZE", "").isdigit() else 1
    if world == 1 and launched > 1 and "RANK" in os.environ and not is_url(path):
        raise GradreelError(
            f"this is process {os.environ['RANK']} of {launched}, but torch.distributed is not initialised; enter the "
            "Recorder after init_process_group, or give each process a path of its own and unset WORLD_SIZE"
        )
    try:
        names = set(names_in(path)) if path.is_dir() else set()
        taken = path.is_file() or bool(names if world == 1 else names - _others(rank, world))
    except OSError as error:
        raise GradreelError(f"{str(path)[:100]!r} cannot be used: {error.strerror or error}; choose another") from None
    if not taken and "header.json" in names and _ranks_in(path) != world:
        taken = True  # a finished run's folder, of which this rank had no part
    if taken:
        holds = "already holds a trace" if "header.json" in names else "is not an empty folder"
        raise TraceError(f"{str(path)!r} {holds}; choose another path or remove it first")


def _others(rank: int, world: int) -> set[str]:
    """What the other ranks of this run may have written by now."""
    found = {f"rank-{other:05d}" for other in range(world) if other != rank}
    return found if rank == 0 else found | {"header.json", ".header.json.tmp"}


def _ranks_in(path: Path) -> int:
    try:
        return read_header(path / "header.json")[0].ranks
    except GradreelError:
        return 0


def layers_here(model: nn.Module, layout: Any) -> list[MoELayer]:
    """The MoE layers of a model; none where it is one stage of a run of several processes that has none."""
    try:
        return find_moe_layers(model, layout)
    except GradreelError:
        if layout is not None or process_place()[1] == 1 or _is_whole(model):
            raise
        return []


def _is_whole(model: nn.Module) -> bool:
    """Whether a model is known to be the whole one on each process."""
    return any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())


def check_sharing(model: nn.Module, sharing: Sharing, at: RecordAt) -> None:
    """Refuse what cannot be recorded in a run of several processes."""
    if not sharing.several:
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise GradreelError(
            "FullyShardedDataParallel flattens its parameters, which cannot be recorded; shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if "micro_norms" in at.streams:
        raise GradreelError(
            f"the stream 'micro_norms' cannot be recorded in a run of {sharing.world} processes: a hook sees one "
            "process's part of a gradient; leave it out of RecordAt(streams=...)"
        )
    if "probe" in at.streams and sharing.is_split:
        raise GradreelError(
            "the stream 'probe' cannot be recorded of a sharded model: its forward would make other processes wait; "
            "leave it out of RecordAt(streams=...)"
        )


def _check_streams(path: Path | None, at: RecordAt, statistics: Any, probe: Any) -> None:
    """Refuse a stream without what makes it, and what makes a stream that is not recorded."""
    for stream, given in (("statistics", statistics), ("probe", probe)):
        if given is not None and stream not in at.streams:
            raise GradreelError(
                f"{stream}= is given, the stream {stream!r} is not recorded; name it, "
                f"RecordAt(streams=(..., {stream!r})), or leave {stream}= out"
            )
    if "probe" in at.streams and probe is None:
        raise GradreelError("the stream 'probe' needs a batch; write Recorder(..., probe=batch) with a fixed one")
    if statistics is not None and not callable(statistics):
        raise GradreelError(f"statistics is a {type(statistics).__name__}; give a function, see traces.statistics")
    if "micro_norms" in at.streams and "routing" not in at.streams:
        raise GradreelError("the stream 'micro_norms' counts routed tokens; name 'routing' in streams as well")
    if "statistics" in at.streams and path is None:
        raise GradreelError("statistics are written to disk; give a path, or compute them from the views in on_step")


def choose_parameters(
    infos: Sequence[ParamInfo], parameters: Mapping[str, nn.Parameter], at: RecordAt, several: bool = False
) -> dict[str, nn.Parameter]:
    """The trainable parameters whose role is recorded, by name; all on one device, which the copies wait for.

    Of `several` processes one may hold none of them.
    """
    trained = [info for info in infos if parameters[info.name].requires_grad]
    wanted = {info.name: parameters[info.name] for info in trained if at.records_role(info.role)}
    if not wanted and not several:
        there = ", ".join(sorted({info.role for info in trained})) or "nothing"
        raise GradreelError(
            f"no trainable parameter has a role in {at.roles}; this model trains {there}; name some of these in "
            "RecordAt(roles=...)"
        )
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
