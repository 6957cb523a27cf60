"""Read a trace: lazily, within bounded memory, and without torch until a tensor is asked for.

Legend: E experts, K top-k, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from traces import _small, _tables
from traces._files import is_locked
from traces._micro import micro_steps
from traces._rank import find_trace
from traces._ranks import Ranks
from traces.errors import NotRecorded, unknown
from traces.schema import LayerInfo, RawTensor, RoutingRecord
from traces.views import NONE, ParamInfo, RoutingStep, StepView

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from traces.verify import Finding


def open_trace(path: str | Path, *, check_hash: bool = True, partial: bool = False) -> Trace:
    """Open a trace folder; `TraceError` where it is none, or where its headers or seals are damaged.

    A trace that is still being written shows the steps sealed at this moment. Data files are checked against their
    seals when they are first read; `check_hash=False` compares sizes only, for traces too large to read in full.
    Of a run of several processes, of which one died or is not there, `partial=True` also shows the steps that only the
    others sealed: what the lost one held raises `NotRecorded`, and routing is told by rank only (`Trace.routing`).
    """
    return Trace(path, check_hash=check_hash, partial=partial)


class Trace:
    """A recorded run. Tensors come in the parameter's own layout and in the dtype they were recorded in."""

    def __init__(self, path: str | Path, *, check_hash: bool = True, partial: bool = False) -> None:
        self.path, top, self.header_hash = find_trace(path)
        self._all = Ranks(self.path, top, self.header_hash, check_hash=check_hash, partial=partial)
        self._ranks, self.header = self._all.folders, self._all.header
        self._params = {p.name: p for p in self.header.params}
        self._layers = {x.layer: x for x in self.header.layers}

    def refresh(self) -> bool:
        """Take in what was sealed since the trace was opened, or refreshed; whether there was anything new.

        Between two calls the trace shows the same steps, however much is written meanwhile. What was sealed before is
        not read again.
        """
        changed = self._all.refresh()
        if changed:
            self.__dict__.pop("steps", None)
        return changed

    # ------------------------------------------------------------------------------------------- what there is

    def __repr__(self) -> str:
        return (
            f"Trace({str(self.path)!r}, steps={len(self.steps)}, params={len(self._params)}, finished={self.finished})"
        )

    @property
    def finished(self) -> bool:
        """Whether every rank was closed; otherwise only sealed steps are seen."""
        return not self._all.absent and all(rank.finished for rank in self._ranks)

    @property
    def being_written(self) -> bool:
        """Whether a live process on this machine still writes the trace; False where that cannot be known."""
        return not self.finished and any(is_locked(rank.folder / "header.json") for rank in self._ranks)

    @property
    def id(self) -> str:
        """Twelve hex digits that pin the header and everything sealed."""
        seals = "".join(rank.last_hash for rank in self._ranks)
        return hashlib.sha256((self.header_hash + seals).encode()).hexdigest()[:12]

    @property
    def missing_ranks(self) -> str:
        """The ranks of the run that are not there (`partial=True`), in words; empty where all are."""
        return self._all.absent

    @property
    def lost_steps(self) -> int:
        """Steps that were seen but could not be written, as counted when the trace was closed."""
        return sum(rank.end.lost_steps for rank in self._ranks if rank.end)

    @property
    def layers(self) -> tuple[LayerInfo, ...]:
        """The MoE layers."""
        return self.header.layers

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that were to be recorded."""
        return self.header.streams

    @property
    def infos(self) -> dict[str, ParamInfo]:
        """Parameter descriptions by name, in the order of the model."""
        return dict(self._params)

    def param(self, name: str) -> ParamInfo:
        """One parameter's description; `UnknownName` with the choices otherwise."""
        if name not in self._params:
            raise unknown("parameter", name, self._params)
        return self._params[name]

    def layer(self, number: int) -> LayerInfo:
        """One MoE layer's description."""
        if number not in self._layers:
            raise unknown("MoE layer", str(number), map(str, self._layers))
        return self._layers[number]

    @cached_property
    def params(self) -> pl.DataFrame:
        """The parameter table: name, role, layer, shape, dtype, num_experts, expert_axis, numel, bytes."""
        return _tables.params_frame(self.header)

    @cached_property
    def steps(self) -> list[int]:
        """Steps of which more than scalars was recorded, increasing."""
        return list(self._all.recorded)

    def recorded_steps(self) -> list[int]:
        """The same as `steps`."""
        return list(self.steps)

    @property
    def all_steps(self) -> list[int]:
        """Every sealed step, those included of which only scalars were kept."""
        return list(self._all.steps)

    def bursts(self) -> list[tuple[int, int]]:
        """(first, last) of each run of consecutive recorded steps."""
        runs: list[list[int]] = []
        for step in self.steps:
            if runs and step == runs[-1][1] + 1:
                runs[-1][1] = step
            else:
                runs.append([step, step])
        return [(first, last) for first, last in runs]

    def contiguous(self) -> bool:
        """Whether the recorded steps have no gap."""
        return len(self.bursts()) <= 1

    # ------------------------------------------------------------------------------------------------- tensors

    def raw(self, stream: str, param: str, step: int, experts: Sequence[int] | None = None) -> RawTensor | None:
        """The stored bits of one tensor, or of some experts of it; None where that tensor is not in the trace.

        Reads only the bytes asked for when the expert axis is the first one.
        """
        return self._all.raw(stream, param, step, experts)

    def gradient(self, param: str, step: int, experts: Sequence[int] | None = None) -> Tensor | None:
        """The fresh gradient of one step, or of some experts of it (in the order asked for).

        None where `.grad` was None; `NotRecorded` where the step, the parameter or an expert was not recorded.
        """
        return self._tensor("gradient", param, step, experts)

    def weight(self, param: str, step: int, experts: Sequence[int] | None = None) -> Tensor:
        """The weight **before** the update of this step; the closing snapshot lies one step past the last."""
        tensor = self._tensor("weight", param, step, experts)
        if tensor is None:
            raise NotRecorded(self._missing("weight", param, step))
        return tensor

    def tensor(self, stream: str, param: str, step: int, experts: Sequence[int] | None = None) -> Tensor | None:
        """A tensor of any stream (`grad_buffer`, `state.exp_avg`, ...), with the rules of `gradient`."""
        return self._tensor(stream, param, step, experts)

    def experts(self, param: str, step: int) -> np.ndarray | None:
        """Ids of the recorded experts of a parameter [n] int64, None meaning all in order."""
        record = self._record(step)
        ids = record.experts.get(self.param(param).name)
        return None if ids is None else np.array(ids, np.int64)

    def presence(self, param: str, step: int) -> np.ndarray:
        """Presence codes of `traces.views`, uint8 [E], or 0-d for a parameter that is no stack of experts."""
        info = self.param(param)
        self._record(step)
        return self._all.presence(info, step)

    def lr(self, step: int, param: str) -> float | None:
        """The learning rate the optimizer used for a parameter in this step; None where it is not known."""
        rates, group = self._record(step).scalars.get("lr"), self._group_of.get(self.param(param).name)
        if isinstance(rates, list):
            return (
                float(rates[group]) if group is not None and group < len(rates) and rates[group] is not None else None
            )
        return float(rates) if isinstance(rates, int | float) else None

    def weight_steps(self, param: str | None = None) -> list[int]:
        """Steps at which a weight is stored (of `param`, or of any parameter), increasing."""
        found = set()
        for rank in self._ranks:
            for seal in rank.seals:
                chunk = rank.chunk(seal)
                if chunk is not None:
                    found |= {k[0] for k in chunk.index() if k[1] == "weight" and param in (None, k[2])}
        return sorted(found & self._all.visible)

    # ---------------------------------------------------------------------------------------- routing, scalars

    def routing(self) -> pl.LazyFrame:
        """All routing: step, micro_step, layer, token, is_pad, expert_0 .. expert_{K-1}; rank where there are several.

        -1 marks a slot that was not executed. Files are checked now, decoded when collected.
        """
        return _tables.routing_frame(self._all)

    def routing_steps(self, layer: int) -> Iterator[RoutingStep]:
        """What one layer executed, step by step; micro-steps and ranks joined. Empty where routing was not recorded."""
        self.layer(layer)
        for step in self.steps:
            routing = self.routing_step(step, layer)
            if routing is not None:
                yield routing

    def routing_step(self, step: int, layer: int) -> RoutingStep | None:
        """What one layer executed in one step; None where its routing was not recorded."""
        self._record(step)
        return _tables.routing_step(self._all, step, self.layer(layer))

    def routing_records(self, step: int, rank: int = 0) -> Iterator[RoutingRecord]:
        """What one process executed in one step, by layer and micro-step, padding included."""
        self._record(step)
        if not 0 <= rank < len(self._ranks):
            raise unknown("rank", str(rank), map(str, range(len(self._ranks))))
        yield from micro_steps(self._ranks[rank], step)

    def scalars(self, rank: int | None = None) -> pl.DataFrame:
        """One row per sealed step, unrecorded ones included: step, recorded, skipped, every scalar, nonfinite.

        NaN and infinities are null; `nonfinite` names them, as in `loss=nan`, and is empty otherwise. Of several ranks
        the lowest that has a scalar counts; tokens are added up, `grad_norm` is put together from the parts. `rank`
        asks for what one rank logged.
        """
        if rank is None:
            return _tables.scalars_frame(self._all.record(step) for step in self.all_steps)
        one = next((folder for folder in self._ranks if folder.rank == rank), None)
        if one is None:
            raise unknown("rank", str(rank), [str(folder.rank) for folder in self._ranks])
        return _tables.scalars_frame(one.step(step) for step in one.steps)

    def statistics(self, param: str | None = None) -> pl.DataFrame:
        """The stream `statistics`: one row per step, parameter and expert, unrecorded steps included.

        Columns: step, param, layer, expert, elements; `sum_squares`, `nonfinite` and `zeros` of the gradient; of its
        pair with the step before `dot`, `dot_squares`, `previous_squares`, `sign_flips`, `sign_support`; and what
        follows: `grad_norm`, `grad_cos` (lag 1), `sign_flip_rate` (lag 1). Undefined values are null.
        """
        name = None if param is None else self.param(param).name
        return _small.statistics_frame(self._small_tensors("statistics", name), self._params)

    def micro_norms(self, param: str, step: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Squared norms of what each micro-step added to a gradient, and the tokens behind it, both float64 [M, E].

        In the scale of the recorded gradient, NaN where unknown; None where the stream was not recorded.
        """
        self._record(step)
        found = self._small_tensor("micro_norms", self.param(param).name, step)
        return None if found is None else (found.data[0], found.data[1])

    def probe(self) -> pl.DataFrame:
        """The stream `probe`, routing of a fixed batch: step, layer, token, expert_0 .. expert_{K-1}.

        The weights are those before the update of the step. -1 marks a slot that was not executed.
        """
        return _small.probe_frame(self._small_tensors("probe", None), self._layers)

    def probe_steps(self) -> list[int]:
        """Steps at which the probe batch was routed, increasing; the last lies one past the last optimizer step."""
        return sorted({step for step, _, _ in self._all.keys_of("probe")})

    def probe_step(self, step: int, layer: int) -> RoutingStep | None:
        """What one layer did with the probe batch before the update of a step; None where it was not routed."""
        info = self.layer(layer)
        self._record(step)
        raw = self._small_tensor("probe", str(layer), step)
        return None if raw is None else _small.probe_routing(step, info, raw)

    def _small_tensor(self, stream: str, name: str, step: int) -> RawTensor | None:
        raw = self._all.raw(stream, name, step)
        if raw is not None:
            where = f"{self.path.name}: {stream} of {name!r} at step {step}"
            tables = self._all.tables
            _small.check_slot(stream, name, raw.dtype, raw.shape, tables, where)
            _small.check_values(stream, name, raw.data, tables, where)
        return raw

    def _small_tensors(self, stream: str, name: str | None) -> Iterator[tuple[int, str, RawTensor]]:
        for step, _, param in self._all.keys_of(stream):
            if name in (None, param) and (raw := self._small_tensor(stream, param, step)) is not None:
                yield step, param, raw

    # ---------------------------------------------------------------------------------------------------- views

    def views(
        self,
        params: Iterable[str] | None = None,
        steps: Iterable[int] | None = None,
        streams: Iterable[str] = ("gradient", "weight", "routing", "micro_norms", "probe"),
    ) -> Iterator[StepView]:
        """StepViews in step order: in each step first one per MoE layer with routing, then one per parameter.

        A layer's probe of the step comes with its routing, or in a view of its own where no routing was recorded.

        A parameter with nothing recorded in a step (presence not_recorded) is left out of it. Holds one step's routing
        and one tensor of each stream at a time.
        """
        names = [self.param(p).name for p in (self._params if params is None else params)]
        wanted = set(streams)
        for step in self.steps if steps is None else sorted(steps):
            yield from self._views_of(step, names, wanted)

    def _views_of(self, step: int, names: list[str], wanted: set[str]) -> Iterator[StepView]:
        scalars = self._record(step).scalars
        routed = {}
        probed = "probe" in wanted and "probe" in self.streams
        for layer in self._layers:
            routing = self.routing_step(step, layer) if "routing" in wanted else None
            probe = self.probe_step(step, layer) if probed else None
            if routing is not None:
                routed[layer] = routing.tokens_per_expert
            if routing is not None or probe is not None:
                yield StepView(step=step, layer=layer, routing=routing, probe=probe, scalars=scalars)
        for name in names:
            info = self._params[name]
            presence = self.presence(name, step)
            gradient = self._maybe("gradient", name, step) if "gradient" in wanted else None
            weight = self._maybe("weight", name, step) if "weight" in wanted else None
            if gradient is None and weight is None and not presence.any():
                continue
            counts = routed.get(info.layer) if info.layer is not None and info.role == "routed_expert" else None
            micro = self.micro_norms(name, step) if "micro_norms" in wanted else None
            yield StepView(
                step=step,
                param=info,
                layer=info.layer,
                gradient=gradient,
                presence=presence,
                weight=weight,
                lr=self.lr(step, name),
                tokens_per_expert=None if counts is None else counts[: info.num_experts],  # ids without weights end it
                experts=self.experts(name, step),
                scalars=scalars,
                micro_norms=None if micro is None else micro[0],
                micro_tokens=None if micro is None else micro[1],
            )

    def verify(self) -> list[Finding]:
        """Read everything and return what is wrong, each finding naming file and step; empty for a sound trace."""
        from traces.verify import verify_trace

        return verify_trace(self.path)

    # ------------------------------------------------------------------------------------------------- private

    @cached_property
    def _group_of(self) -> dict[str, int]:
        groups = self.header.run.get("groups")
        found: dict[str, int] = {}
        for number, group in enumerate(groups if isinstance(groups, list) else []):
            names = group.get("params") if isinstance(group, dict) else group
            found.update({name: number for name in names if isinstance(name, str)} if isinstance(names, list) else {})
        return found

    def _record(self, step: int) -> Any:
        if step not in self._all.visible:
            raise NotRecorded(f"step {step} is not in {self.path.name}; it holds {self._span()}{self._why(step)}")
        return self._all.record(step)

    def _why(self, step: int) -> str:
        """Of several ranks, which have not sealed a step that others have."""
        if not self._all.with_step(step) or not (lacking := self._all.lacking(step)):
            return ""
        return f"; {lacking} did not seal that step, open_trace(path, partial=True) reads what the others did"

    def _span(self) -> str:
        steps = self.all_steps
        return f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if steps else "no sealed step"

    def _tensor(self, stream: str, param: str, step: int, experts: Sequence[int] | None) -> Tensor | None:
        from traces._torch import to_torch

        info = self.param(param)
        self._record(step)
        raw = self.raw(stream, param, step, experts)
        if raw is not None:
            return to_torch(raw)
        if (
            stream in ("gradient", "grad_buffer")
            and info.expert_axis is None
            and int(self.presence(param, step)) == NONE
        ):
            return None
        if (
            stream in ("gradient", "grad_buffer")
            and (codes := self.presence(param, step)).size
            and (codes == NONE).all()
        ):
            return None
        raise NotRecorded(self._missing(stream, param, step))

    def _maybe(self, stream: str, param: str, step: int) -> Tensor | None:
        from traces._torch import to_torch

        raw = self.raw(stream, param, step)
        return None if raw is None else to_torch(raw)

    def _missing(self, stream: str, param: str, step: int) -> str:
        where = f"{stream} of {param!r} at step {step} is not in {self.path.name}"
        if stream not in self.streams and stream != "weight":
            return f"{where}: the stream was not recorded; record it with RecordAt(streams=(..., {stream!r}))"
        if step in self.steps and stream != "weight":
            return f"{where}: the role {self.param(param).role!r} was not recorded; name it in RecordAt(roles=...)"
        if stream == "weight":
            return (
                f"{where}: weights are stored at the first recorded step and after the last; see Trace.weight_steps()"
            )
        return f"{where}: only scalars were kept of this step; see Trace.steps"
