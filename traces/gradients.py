"""The tensors of one step, taken where an optimizer shows them: unscaled, fresh, and copied once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from traces.expert_sample import ExpertSample
from traces.micro_norms import MicroNorms
from traces.record_at import RecordAt
from traces.records import Job, total_norm
from traces.run_info import initial_state
from traces.sharing import Sharing, local_part
from traces.spool import CpuTransfer, CudaTransfer
from traces.statistics import GradientStatistics, by_expert
from traces.step_hooks import StepHooks
from traces.views import ParamInfo

Taken = Mapping[str, tuple[nn.Parameter, Tensor | None]]


class GradientCopier:
    """Puts the tensors of a step into its job. With `live`, the gradients themselves are in `live` until it is over.

    `statistics` and `micro_norms` are None where their streams are not recorded.
    """

    def __init__(
        self,
        at: RecordAt,
        infos: Mapping[str, ParamInfo],
        hooks: StepHooks,
        transfer: CpuTransfer | CudaTransfer,
        device: torch.device,
        sample: ExpertSample,
        sharing: Sharing,
        *,
        statistics: GradientStatistics | None,
        micro_norms: MicroNorms | None,
        live: bool,
    ) -> None:
        self.at, self.live = at, dict[str, Tensor | None]()
        self.statistics, self.micro_norms, self.sample = statistics, micro_norms, sample
        self._infos, self._hooks, self._transfer, self._device = infos, hooks, transfer, device
        self._keeps_live, self._sharing = live, sharing
        self._dtype: torch.dtype | None = getattr(torch, at.dtype) if at.dtype else None

    def take(self, job: Job, optimizer: torch.optim.Optimizer, *, first: bool) -> None:
        """Take what `optimizer` is about to use; `first` says that no step was recorded before."""
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if found_inf is not None and (self._device.type == "cpu" or first or self._keeps_live):
            job.skipped = job.skipped or bool(found_inf.item() > 0)
        elif found_inf is not None:
            job.found_inf = found_inf.detach().clone()
        if job.skipped or not (job.recorded or job.reserved):
            return
        fresh = getattr(optimizer, "fresh_gradient", None)
        every = [p for group in optimizer.param_groups for p in group["params"]]
        held = self._hooks.parameters_of(optimizer)
        recorded = {id(p) for p in held.values()}
        gradients = {
            id(p): self._sharing.gradient(p, fresh(p) if callable(fresh) else p.grad, id(p) in recorded) for p in every
        }
        if job.recorded and "grad_norm" not in job.scalars and (own := self._sharing.own(every)) is not None:
            norm, before = total_norm([g.detach() for p in own if (g := gradients[id(p)]) is not None], scale), job.norm
            if norm is None and self._sharing.several:
                norm = torch.zeros(())  # another rank's gradients are the norm's other parts
            job.norm = norm if before is None or norm is None else torch.hypot(before, norm)
        mine = {name: (p, gradients[id(p)]) for name, p in held.items() if self._sharing.writes(name)}
        if job.reserved:
            self._transfer.begin(job.estimated_bytes)
            self._take_small(job, mine, scale)
            self._copy(job, optimizer, mine, scale, first)
            for micro in job.micro_steps:
                micro.to_host(self._transfer.small)
            job.ready.append(self._transfer.end())
        if self._keeps_live and job.recorded:
            for name, p in held.items():
                gradient = gradients[id(p)]
                self.live[name] = gradient if gradient is None or scale is None else gradient / scale

    def snapshot(self, step: int, estimated_bytes: int) -> Job:
        """The recorded parameters' weights as they are now, as the closing snapshot of step `step`."""
        job = Job(step, False, {}, closing=True, estimated_bytes=estimated_bytes)
        if self.at.weights != "none":
            self._transfer.begin(job.estimated_bytes)
            for name, parameter in self._hooks.parameters.items():
                if self._sharing.writes(name):
                    self._add(job, "weight", name, local_part(parameter))
            job.ready.append(self._transfer.end())
        return job

    def _take_small(self, job: Job, mine: Taken, scale: Tensor | None) -> None:
        """What is computed of every expert where the gradients are, and needs no copy of them."""
        for name, (_, gradient) in mine.items():
            if gradient is None:
                job.absent.append(name)
                if self.statistics is not None:
                    self.statistics.forget(name)
                continue
            info = self._infos[name]
            dense = described(_dense(gradient), info)
            if self.statistics is not None:
                self._add_small(job, "statistics", name, self.statistics.take(info, dense, scale, job.step))
            elif job.recorded and self.sample.ids(info) is not None:
                busy = by_expert(dense, info.expert_axis).ne(0).any(1)  # presence of experts that are not copied
                self._add_small(job, "presence", name, busy)
            if self.micro_norms is not None and job.recorded:
                norms = self.micro_norms.take(info, job.micro_steps, dense, scale)
                if norms is not None:
                    self._add_small(job, "micro_norms", name, norms)

    def _add_small(self, job: Job, stream: str, name: str, values: Tensor) -> None:
        job.small.append((stream, name, self._transfer.small(values)))

    def _copy(self, job: Job, optimizer: torch.optim.Optimizer, mine: Taken, scale: Tensor | None, first: bool) -> None:
        streams = self.at.streams
        hidden = getattr(optimizer, "grad_buffer", None)  # where history is not in `.grad` itself
        if first and job.recorded:
            state = initial_state([optimizer], {name: parameter for name, (parameter, _) in mine.items()})
            job.tensors += [
                (stream, name, self._transfer.copy(local_part(value.detach()))) for stream, name, value in state
            ]
        weighed = (first and job.recorded and self.at.weights != "none") or self.at.weighs(job.step)
        for name, (parameter, gradient) in mine.items():
            if weighed or ("weight" in streams and job.recorded):
                self._add(job, "weight", name, local_part(parameter))
            if gradient is None or not job.recorded:
                continue
            if "gradient" in streams:
                self._add(job, "gradient", name, _dense(gradient), self._dtype, scale)
            buffer = hidden(parameter) if callable(hidden) else parameter.grad
            if "grad_buffer" in streams and buffer is not None:
                self._add(job, "grad_buffer", name, local_part(buffer), self._dtype)

    def _add(
        self,
        job: Job,
        stream: str,
        name: str,
        tensor: Tensor,
        dtype: torch.dtype | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """Copy the recorded experts of a tensor."""
        info = self._infos[name]
        ids, place = self.sample.ids(info), self.sample.place(info)
        if ids is None or place is None:
            job.tensors.append((stream, name, self._transfer.copy(tensor.detach(), dtype, scale)))
            return
        if place not in job.chosen:
            job.chosen[place] = self._transfer.small(ids)
        if info.expert_axis is None:
            if not self.sample.leaves_out(info):
                job.tensors.append((stream, name, self._transfer.copy(tensor.detach(), dtype, scale)))
            return
        whole = described(tensor.detach(), info)
        copied = self._transfer.copy(whole, dtype, scale, select=(info.expert_axis, ids))
        job.tensors.append((stream, name, copied))


def described(tensor: Tensor, info: ParamInfo) -> Tensor:
    """A parameter that holds its experts fused, [E * F, H], as the header describes it, [E, F, H]."""
    fused = tensor.ndim == 2 and len(info.shape) == 3 and tensor.numel() == info.numel
    return tensor.reshape(info.shape) if fused else tensor


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
