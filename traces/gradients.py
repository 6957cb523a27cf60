"""The tensors of one step, taken where an optimizer shows them: unscaled, fresh, and copied once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from traces.record_at import RecordAt
from traces.records import Job, total_norm
from traces.run_info import initial_state
from traces.spool import CpuTransfer, CudaTransfer
from traces.step_hooks import StepHooks


class GradientCopier:
    """Puts the tensors of a step into its job. With `live`, the gradients themselves are in `live` until it is over."""

    def __init__(
        self, at: RecordAt, hooks: StepHooks, transfer: CpuTransfer | CudaTransfer, device: torch.device, *, live: bool
    ) -> None:
        self.at, self.live = at, dict[str, Tensor | None]()
        self._hooks, self._transfer, self._device, self._keeps_live = hooks, transfer, device, live
        self._dtype: torch.dtype | None = getattr(torch, at.dtype) if at.dtype else None

    def take(self, job: Job, optimizer: torch.optim.Optimizer, *, first: bool) -> None:
        """Take what `optimizer` is about to use; `first` says that no step was recorded before."""
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if found_inf is not None and (self._device.type == "cpu" or first or self._keeps_live):
            job.skipped = job.skipped or bool(found_inf.item() > 0)
        elif found_inf is not None:
            job.found_inf = found_inf.detach().clone()
        if not job.recorded or job.skipped:
            return
        fresh = getattr(optimizer, "fresh_gradient", None)
        every = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = {id(p): fresh(p) if callable(fresh) else p.grad for p in every}
        if "grad_norm" not in job.scalars:
            norm, before = total_norm([g.detach() for g in gradients.values() if g is not None], scale), job.norm
            job.norm = norm if before is None or norm is None else torch.hypot(before, norm)
        mine = {name: (p, gradients[id(p)]) for name, p in self._hooks.parameters_of(optimizer).items()}
        if job.reserved:
            self._copy(job, optimizer, mine, scale, first)
        if self._keeps_live:
            for name, (_, gradient) in mine.items():
                self.live[name] = gradient if gradient is None or scale is None else gradient / scale

    def snapshot(self, step: int, estimated_bytes: int) -> Job:
        """The recorded parameters' weights as they are now, as the closing snapshot of step `step`."""
        job = Job(step, False, {}, closing=True, estimated_bytes=estimated_bytes)
        self._transfer.begin(job.estimated_bytes)
        for name, parameter in self._hooks.parameters.items():
            job.tensors.append(("weight", name, self._transfer.copy(parameter.detach())))
        job.ready.append(self._transfer.end())
        return job

    def _copy(
        self,
        job: Job,
        optimizer: torch.optim.Optimizer,
        mine: Mapping[str, tuple[nn.Parameter, Tensor | None]],
        scale: Tensor | None,
        first: bool,
    ) -> None:
        transfer, streams = self._transfer, self.at.streams
        hidden = getattr(optimizer, "grad_buffer", None)  # where history is not in `.grad` itself
        transfer.begin(job.estimated_bytes)
        if first:
            state = initial_state([optimizer], {name: parameter for name, (parameter, _) in mine.items()})
            job.tensors += [(stream, name, transfer.copy(value.detach())) for stream, name, value in state]
        for name, (parameter, gradient) in mine.items():
            if first or "weight" in streams:
                job.tensors.append(("weight", name, transfer.copy(parameter.detach())))
            if gradient is None:
                job.absent.append(name)
                continue
            gradient = gradient.detach()
            if "gradient" in streams:
                dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                job.tensors.append(("gradient", name, transfer.copy(dense, self._dtype, scale)))
            buffer = hidden(parameter) if callable(hidden) else parameter.grad
            if "grad_buffer" in streams and buffer is not None:
                job.tensors.append(("grad_buffer", name, transfer.copy(buffer.detach(), self._dtype)))
        for micro in job.micro_steps:
            micro.to_host(transfer.small)
        job.ready.append(transfer.end())
