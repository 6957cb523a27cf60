"""What this process holds of a run's model, and which of it this process writes.

Nothing here communicates: a rank that records must never wait for one that does not. DTensors tell their place in the
mesh, DDP its process group, a `Layout` the ids of its experts; what none of them tells is written by every rank that
has it, and read from the lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from traces.errors import GradreelError
from traces.gradient_sources import GradientSource
from traces.layouts import MoELayer
from traces.module_names import block_number
from traces.placements import FLAT, Placement, local_info
from traces.schema import StepRecord
from traces.spool import presence_codes
from traces.views import NONE, NOT_RECORDED, ParamInfo

Names = Callable[[str], str] | Mapping[str, str]


def process_place() -> tuple[int, int]:
    """Rank and number of the processes of this run, (0, 1) outside of torch.distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def local_part(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lies on this process; any other tensor as it is."""
    local = getattr(tensor, "to_local", None)
    if local is None:
        return tensor
    with torch.no_grad():
        part: Tensor = local()
        wait = getattr(part, "wait", None)  # a collective that is still under way
        return wait() if callable(wait) else part


def global_name(name: str, names: Names | None) -> str:
    """A local parameter or module name as the whole run knows it; a mapping replaces the longest prefix it has."""
    if names is None:
        return name
    if not isinstance(names, Mapping):
        return str(names(name))
    for prefix in sorted(names, key=len, reverse=True):
        if name == prefix or name.startswith(f"{prefix}."):
            return names[prefix] + name[len(prefix) :]
    return name


class Sharing:
    """The parts and names of one process.

    `params` describe the whole tensors, as the header lists them; `local` maps each name to a description of what lies
    here; `parts` maps the names of which not all lies here to their placement.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        parameters: Mapping[str, nn.Parameter],
        layers: Sequence[MoELayer],
        names: Names | None = None,
        source: GradientSource | None = None,
    ) -> None:
        self._source = source
        self.rank, self.world = process_place()
        self.parts: dict[str, Placement] = {}
        self.params: list[ParamInfo] = []
        self.local: dict[str, ParamInfo] = {}
        self._whole: dict[str, ParamInfo] = {}
        self._names: dict[int, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._elsewhere: set[str] = set()  # names that another rank writes
        self._known: set[str] = set()  # names of which it is known who writes them
        self._replicated_by: Any = None
        self._rename_layers(layers, names)
        moved = {layer.layer: layer for layer in layers}
        for info in infos:
            self._add(info, parameters[info.name], moved, names)

    @property
    def several(self) -> bool:
        """Whether this is a run of several processes."""
        return self.world > 1

    @property
    def is_split(self) -> bool:
        """Whether of any parameter only a part lies here."""
        return bool(self.parts)

    def writes(self, name: str) -> bool:
        """Whether this process writes (its part of) a parameter."""
        return name not in self._elsewhere

    def knows_owner(self, name: str) -> bool:
        """Whether it is known that no other process writes the same part."""
        return not self.several or name in self._known

    def placements(self, recorded: Iterable[str]) -> dict[str, Placement | None]:
        """What the rank's header says of the recorded parameters."""
        found: dict[str, Placement | None] = {}
        for name in recorded:
            if not self.writes(name):
                found[name] = None
            elif name in self.parts:
                found[name] = self.parts[name]
        return found

    # ---------------------------------------------------------------------------------------- tensors of a step

    def gradient(self, parameter: Tensor, gradient: Tensor | None, recorded: bool = True) -> Tensor | None:
        """The part of a gradient that lies here, laid out as the parameter's own part.

        A gradient that the mesh has still to add up is no gradient yet, and adding it up would make this rank wait:
        GradreelError where it is to be recorded.
        """
        if gradient is None or not hasattr(gradient, "placements"):
            return gradient
        mine, its = getattr(parameter, "placements", None), tuple(gradient.placements)
        if mine is not None and its == tuple(mine):
            return local_part(gradient)
        if not recorded:
            return None
        raise GradreelError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} has placements {its}, the parameter "
            f"{mine}; redistribute it before optimizer.step(), or leave its role out of RecordAt(roles=...)"
        )

    def own(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """Those of an optimizer's parameters whose gradients this rank adds to the norm; None where it is not known."""
        if not self.several:
            return list(parameters)
        names = [self._names.get(id(parameter)) for parameter in parameters]
        if any(name is None or not self.knows_owner(name) for name in names):
            return None
        return [p for p, name in zip(parameters, names, strict=True) if name is not None and self.writes(name)]

    def why_silent(self, model: nn.Module) -> str:
        """What may have kept every hook from firing, as the beginning of an advice."""
        now = {id(parameter) for parameter in model.parameters()}
        if any(hasattr(p, "placements") for p in model.parameters()) and now.isdisjoint(self._names):
            return "the model was sharded after the Recorder was built, so build it after fully_shard; "
        return ""

    # ------------------------------------------------------------------------------------------------ who writes

    def look_for_ddp(self, model: nn.Module | None = None) -> None:
        """Take note of the DDP wrapper around a model, or of the one whose forward is under way."""
        if not self.several or self._replicated_by is not None:
            return
        wrapper: Any = nn.parallel.DistributedDataParallel
        found = next((m for m in model.modules() if isinstance(m, wrapper)), None) if model is not None else None
        if found is None:
            active = getattr(wrapper, "_get_active_ddp_module", None)
            found = active() if callable(active) else None
        if found is None:
            return
        self._replicated_by = found
        lowest = min(torch.distributed.get_process_group_ranks(found.process_group))
        managed = {id(p) for p in getattr(found, "_module_parameters", None) or found.module.parameters()}
        for name, parameter in self.parameters.items():
            if id(parameter) in managed and name not in self._known:
                self._known.add(name)
                if self.rank != lowest:
                    self._elsewhere.add(name)

    # -------------------------------------------------------------------------------------------- how it is built

    def _rename_layers(self, layers: Sequence[MoELayer], names: Names | None) -> None:
        self._numbers = {layer.layer: layer.layer for layer in layers}
        if names is None:
            return
        for layer in layers:
            old = layer.layer
            number = block_number(global_name(layer.experts_name, names))
            layer.layer = self._numbers[old] = old if number is None else number
            layer.block_name = global_name(layer.block_name, names) if layer.block_name else layer.block_name

    def _add(
        self, info: ParamInfo, parameter: nn.Parameter, layers: Mapping[int, MoELayer], names: Names | None
    ) -> None:
        layer = layers.get(self._numbers.get(-1 if info.layer is None else info.layer, -1))
        number = info.layer if names is None else block_number(global_name(info.name, names))
        number = self._numbers.get(-1 if info.layer is None else info.layer, number)
        whole = replace(info, name=global_name(info.name, names), layer=number)
        local = whole
        held = layer.global_expert_ids if layer is not None and info.role == "routed_expert" else None
        if hasattr(parameter, "placements"):
            whole, local = self._of_dtensor(whole, parameter)
        elif held is not None and layer is not None and info.expert_axis is not None:
            part = Placement.of({info.expert_axis: held})
            shape = list(info.shape)
            shape[info.expert_axis] = layer.num_experts
            whole = replace(whole, shape=tuple(shape), num_experts=layer.num_experts, strides=None)
            local = local_info(whole, part)
            self.parts[whole.name] = part
            self._known.add(whole.name)
        elif held is not None and layer is not None and info.expert is not None:
            whole = local = replace(
                whole, name=_in_list(whole.name, info.expert, held[info.expert]), expert=held[info.expert]
            )
            self._known.add(whole.name)
        if self._source is not None:
            whole, local = self._of_source(whole, local, parameter, self._source)
        if whole.name in self.local:
            raise GradreelError(f"global_names gives two parameters the name {whole.name!r}; names must stay different")
        self.params.append(whole)
        self._whole[whole.name] = whole
        self.local[whole.name] = local
        self.parameters[whole.name] = parameter
        self._names[id(parameter)] = whole.name

    def _of_source(
        self, whole: ParamInfo, local: ParamInfo, parameter: nn.Parameter, source: GradientSource
    ) -> tuple[ParamInfo, ParamInfo]:
        """Who writes, and which part, as a framework says."""
        self._known.add(whole.name)
        if not source.writes(parameter):
            self._elsewhere.add(whole.name)
        found = source.part(parameter, local.shape)
        if found is None:
            return whole, local
        part, shape = found
        known = self.parts.get(whole.name)
        if known is not None:  # experts that lie here, each of them cut again
            part = Placement({**part.runs, **known.runs})
            shape = tuple(max(sizes) for sizes in zip(shape, whole.shape, strict=True))
        axis = whole.expert_axis
        whole = replace(
            whole, shape=shape, num_experts=whole.num_experts if axis is None else shape[axis], strides=None
        )
        self.parts[whole.name] = part
        return whole, local_info(whole, part)

    def _of_dtensor(self, whole: ParamInfo, parameter: Any) -> tuple[ParamInfo, ParamInfo]:
        """A DTensor's whole and local description; the lowest of its replicas writes it."""
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        coordinate = mesh.get_coordinate()
        self._known.add(whole.name)
        if any(placement.is_partial() for placement in placements):
            raise GradreelError(f"parameter {whole.name!r} has placement {placements}; allowed: Shard and Replicate")
        if coordinate is None:
            self._elsewhere.add(whole.name)
            return whole, replace(whole, strides=None)
        if any(place.is_replicate() and at > 0 for place, at in zip(placements, coordinate, strict=True)):
            self._elsewhere.add(whole.name)
        indices = _indices_of(tuple(parameter.shape), tuple(mesh.shape), coordinate, placements, whole.name)
        if not indices:
            return whole, whole
        part = Placement.of(indices)
        if whole.shape != tuple(parameter.shape):  # fused experts [E * F, H], described as [E, F, H]
            if set(indices) != {0}:
                raise GradreelError(
                    f"parameter {whole.name!r} holds fused experts and is split along another axis than the first; "
                    "shard it along axis 0"
                )
            width = whole.numel // max(parameter.shape[0], 1)
            part = Placement({FLAT: tuple((first * width, count * width) for first, count in part.runs[0])})
        self.parts[whole.name] = part
        return whole, local_info(whole, part)

    # ------------------------------------------------------------------------------------------- what is recorded

    def to_global(self, record: StepRecord) -> StepRecord:
        """A record of local parts, with expert ids and presence as the whole run counts them."""
        for name, part in self.parts.items():
            if name not in record.presence and name not in record.experts:
                continue
            whole = self._whole[name]
            axis = whole.expert_axis
            if name in record.experts and axis is not None and part.splits(axis):
                own = part.indices(axis)
                ids = own[np.asarray(record.experts[name], np.int64)]
                order = np.argsort(ids, kind="stable")
                if (order != np.arange(len(ids))).any():
                    self._reorder(record, name, axis, order)
                record.experts[name] = ids[order]
            if name in record.presence and axis is not None:
                record.presence[name] = self._presence(record, name, whole, part)
        return record

    @staticmethod
    def _reorder(record: StepRecord, name: str, axis: int, order: np.ndarray) -> None:
        """Stored slices follow increasing global ids."""
        for stream in ("gradient", "grad_buffer", "weight"):
            raw = record.tensors.get((stream, name))
            if raw is not None:
                data = np.ascontiguousarray(np.take(raw.data, order, axis=axis))
                record.tensors[stream, name] = replace(raw, data=data)

    def _presence(self, record: StepRecord, name: str, whole: ParamInfo, part: Placement) -> np.ndarray:
        width = whole.num_experts or 0
        codes = np.full(width, NOT_RECORDED, np.uint8)
        found = record.presence[name]
        if not part.is_flat:
            if not part.splits(whole.expert_axis):
                return found
            codes[part.indices(whole.expert_axis or 0)] = found.reshape(-1)
            return codes
        each = whole.numel // max(width, 1)
        raw = record.tensors.get(("gradient", name))
        start = 0
        for first, count in part.runs[FLAT] if whole.expert_axis == 0 and each else ():
            for expert in range(first // each, -(-(first + count) // each)):
                low, high = max(first, expert * each), min(first + count, (expert + 1) * each)
                if raw is not None:
                    piece = raw.data.reshape(-1)[start + low - first : start + high - first]
                    code = presence_codes(piece, raw.dtype, None)
                    codes[expert] = max(int(codes[expert]), int(code))
                elif int(found.reshape(-1)[0]) == NONE:
                    codes[expert] = NONE
            start += count
        return codes


def _in_list(name: str, local: int, number: int) -> str:
    """`layers.0.experts.1.weight` with the expert's number in the whole run."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts) if part == str(local) and i and not parts[i - 1].isdigit()]
    if not places:
        raise GradreelError(
            f"parameter {name!r} does not show the number {local} of its expert; give global_names= as a function"
        )
    parts[places[-1]] = str(number)
    return ".".join(parts)


def _indices_of(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    name: str,
) -> dict[int, Iterable[int]]:
    """Global indices along each split axis of what lies at a coordinate of a mesh, as torch splits: axis by axis of
    the mesh, each in pieces as `torch.chunk` makes them."""
    held: dict[int, Any] = {}
    for size, at, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        axis = getattr(placement, "dim", None)
        if axis is None:
            raise GradreelError(f"parameter {name!r} has placement {placement}; allowed: Shard and Replicate")
        axis %= len(shape)
        before = held.get(axis, range(shape[axis]))
        factor = int(getattr(placement, "split_factor", 1))  # FSDP over tensor parallelism cuts each of its pieces
        if factor == 1:
            held[axis] = _chunk(before, size, at)
        else:
            held[axis] = [i for piece in range(factor) for i in _chunk(_chunk(before, factor, piece), size, at)]
    return held


def _chunk(indices: Any, pieces: int, wanted: int) -> Any:
    """One of the pieces of a sequence of indices, all of the same length but for the last ones."""
    length = -(-len(indices) // pieces)
    return indices[wanted * length : (wanted + 1) * length]
