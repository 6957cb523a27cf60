"""Record a live training run: two lines around the user's loop, and no change of the loop.

    with Recorder("olmoe.trace", model, optimizer) as reel:
        train(model, optimizer)

Forward hooks see the executed expert ids, the optimizer's step pre-hook sees the gradients; one writer thread does the
rest. A recording that cannot go on ends with a notice; the training it watches goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from traces.checks import check_arguments, check_gradients, check_types, choose_parameters, choose_probes
from traces.errors import GradreelError
from traces.hooks import ForwardWatch, check_micro_steps
from traces.layouts import find_moe_layers
from traces.live import live_views
from traces.plan import Plan
from traces.record_at import RecordAt, format_bytes
from traces.records import Assembler, Job, total_norm
from traces.roles import describe_params, named_parameters
from traces.run_info import describe_run, group_rates, initial_state
from traces.scalars import why_not_kept
from traces.schema import Header, header_to_json
from traces.sink import TraceSink
from traces.spool import transfer_for
from traces.step_hooks import StepHooks
from traces.views import ParamInfo, StepCallback


class Recorder:
    """Record `model`'s routing and gradients into the new folder `path`, as a context manager.

    `optimizer` None watches every optimizer of the process that holds parameters of this model, which is the way for
    loops that hide theirs; several may be given as a list. `at` says what and when. `layout` declares MoE layers that
    are not recognised (`traces.layouts.Layout`). `on_step(views)` is called at each recorded step, before the update,
    with StepViews whose tensors are lent; with it `path` may be None, and nothing is written. `roles` overrides roles
    by parameter name or pattern. A full queue of `queue_steps` steps blocks training (`when_full="block"`) or loses the
    step and counts it (`"drop"`). Errors of the disk lose steps, are counted and told at the end; `strict=True` raises
    them in the training loop instead. `notify` receives notices (default: stderr).

    Raises `GradreelError` before training where the model has no experts, the optimizer none of the recorded
    parameters, the budget no room for one step, or the path a trace; after the first recorded step where a hook stayed
    silent.
    """

    def __init__(
        self,
        path: str | Path | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        at: RecordAt | None = None,
        layout: Any = None,
        statistics: Callable[..., Any] | None = None,
        on_step: StepCallback | None = None,
        strict: bool = False,
        *,
        roles: Mapping[str, str] | None = None,
        when_full: str = "block",
        queue_steps: int = 4,
        notify: Callable[[str], None] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        check_types(path, model, at, roles)
        self.at = at if at is not None else RecordAt()
        self.path = None if path is None else Path(path)
        self.on_step, self.strict = on_step, strict
        self.step = self.recorded_steps = 0
        self._notify = notify or _to_stderr
        check_arguments(self.path, self.at, on_step, statistics)
        self.layers = find_moe_layers(model, layout)
        self.params: list[ParamInfo] = describe_params(model, roles, layout)
        self._infos = {info.name: info for info in self.params}
        self._model, self._provenance = model, dict(provenance or {})
        self._all_parameters = named_parameters(model)
        self._parameters = choose_parameters(self.params, self._all_parameters, self.at)
        self._device = next(iter(self._parameters.values())).device
        self.plan = Plan(self.at, [self._infos[name] for name in self._parameters], self.layers)
        for layer in self.layers:
            self.at.choose_experts(layer.num_experts)  # an id that is no expert is told now
        self._dtype: torch.dtype | None = getattr(torch, self.at.dtype) if self.at.dtype else None
        self._routing = "routing" in self.at.streams
        self._transfer = transfer_for(self._device)
        self._watch = ForwardWatch(model, self.layers, self.at.streams, self._on_forward)
        self._hooks = StepHooks(self._parameters, optimizer, self._on_gradients, self._in_closure)
        self._sink: TraceSink | None = None
        if self.path is not None:
            self.plan.check_room()
            header_to_json(self._header({}, self.at.streams))  # what cannot be written is told now
            self._assembler = Assembler(self._infos, self.layers, self._transfer.pool, self.at)
            # Absolute: a script that changes its folder goes on writing where it began.
            self._sink = TraceSink(self.path.absolute(), self._assembler, when_full, queue_steps)
        self._scalars: dict[str, Any] = {}
        self._entered = self._over = self._told_error = False
        self._told: set[str] = set()  # names of scalars that cannot be kept
        self._open: list[torch.optim.Optimizer] = []  # that took part in the step `_job` so far
        self._job: Job | None = None
        self._done: Job | None = None  # finished, and open for late scalars until the next forward
        self._live: dict[str, Tensor | None] = {}
        self._backward_seen = self._planned = self._checked = self._budget_spent = False
        self._probes = choose_probes(self.params, self._all_parameters)
        self._held: tuple[nn.Parameter, Tensor | None, int] | None = None
        self._version: int | None = None  # of the first probe's gradient after its last backward
        self._probe_handles: list[Any] = []

    # ------------------------------------------------------------------------------------------ what users call

    def log(self, **scalars: Any) -> None:
        """Keep scalars (loss=..., clip_factor=...) with the current step; a tensor is read out later, off this thread.

        What is logged between a step's forward and the next one's belongs to that step, before or after its update.
        A value that a trace cannot hold is left out, with one notice.
        """
        copied = {}
        for key, value in scalars.items():
            why = why_not_kept(key, value)
            if why is None:
                copied[key] = value.detach().clone() if isinstance(value, Tensor) else value
            elif key not in self._told:
                self._told.add(key)
                self._notify(f"reel.log: {why}; it is left out, all else is recorded")
        if self._done is not None:
            self._done.scalars.update(copied)
        else:
            self._scalars.update(copied)

    def mask(self, attention_mask: Tensor) -> None:
        """Say which tokens of the next forward are real (non-zero) and which padding (0), in the order of routing."""
        if not isinstance(attention_mask, Tensor):
            raise GradreelError(f"mask is a {type(attention_mask).__name__}; give a tensor with one entry per token")
        self._watch.next_mask = attention_mask

    def begin_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a training forward of the whole model that had begun before the hooks were added."""
        self._watch.begin_late(module, args, kwargs)

    def flush(self) -> None:
        """Hand over the finished step and wait until the writer has taken it; later scalars go to the next step."""
        self._hand_over()
        if self._sink is not None and not self._over:
            self._sink.drain()

    @property
    def dropped_steps(self) -> int:
        """Steps that a full queue lost (`when_full="drop"`)."""
        return self._sink.dropped if self._sink else 0

    @property
    def lost_steps(self) -> int:
        """Steps that could not be written."""
        return self._sink.lost if self._sink else 0

    @property
    def buffer_bytes(self) -> int:
        """Host memory that the copies of gradients and weights have taken so far."""
        return self._transfer.pool.allocated_bytes

    def __enter__(self) -> Recorder:
        if self._entered:
            raise GradreelError("this Recorder was entered before; one Recorder makes one recording, build another")
        if self._sink is not None:
            self._sink.open()
        self._entered = True
        self._watch.install()
        self._hooks.install()
        self._probe_handles = [p.register_post_accumulate_grad_hook(self._on_backward) for p in self._probes[:1]]
        self._prepare_next()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._over or not self._entered:
            return
        self._over = True
        try:
            if self._open:
                self._finish_step()
            self._hand_over()
            if self._sink is not None and self.recorded_steps and not self._budget_spent:
                self._sink.put(self._snapshot(self.step + 1))
        finally:
            self._watch.remove()
            self._hooks.remove()
            for handle in self._probe_handles:
                handle.remove()
            if self._sink is not None:
                self._sink.close(self._notify)
                self._tell_misfits()
        if kind is not None:
            return  # the user's own exception matters more than what the recording has to say
        if self.step == 0:
            raise GradreelError(
                "no optimizer step was seen while recording; enter the Recorder before training, and give it the "
                "optimizer that holds this model's parameters"
            )
        if self.recorded_steps == 0:
            raise GradreelError(
                f"none of {self.step} optimizer steps could be recorded: all were skipped over an inf, or "
                "dropped; train longer"
            )
        self._raise_if_strict()

    # ------------------------------------------------------------------------------------------ a step begins

    def _wants(self, step: int) -> bool:
        return self.at.records(step) and (self.on_step is not None or not self._budget_spent)

    def _prepare_next(self) -> None:
        self._backward_seen = False
        self._watch.capturing = self._routing and self._wants(self.step + 1)

    def _on_backward(self, parameter: Tensor) -> None:
        self._backward_seen = True
        self._version = parameter.grad._version if parameter.grad is not None else None

    def _in_closure(self, inside: bool) -> None:
        self._watch.frozen = inside

    def _on_forward(self) -> None:
        """A training forward begins: the step before it is over, or its gradients were thrown away."""
        self._hooks.forget_unfinished()
        if self._open:
            self._finish_step()
        self._hand_over()
        self._drop_thrown_away()
        if self._watch.micro_steps and self._backward_seen:
            held = next((p for p in self._probes if p.grad is not None), None)
            if held is None or self._emptied():
                scalars, self._scalars = self._scalars, {}
                self._held, self._backward_seen = None, False
                self._skip_step(len(self._watch.micro_steps), scalars)
            elif self._held is None:
                self._held = (held, held.grad, len(self._watch.micro_steps))

    def _drop_thrown_away(self) -> None:
        """Backward accumulates into one tensor; another one in its place means that `zero_grad` came between."""
        if self._held is None:
            return
        probe, gradient, count = self._held
        now = probe.grad
        if now is not gradient and (now is None or not now.requires_grad):  # create_graph replaces it at each backward
            self._held = None
            self._skip_step(count, {})

    def _emptied(self) -> bool:
        """`zero_grad(set_to_none=False)` keeps the tensor, so that only its content tells what became of it.

        It is read, which waits for the device, only where something wrote into it since its last backward.
        """
        gradient = self._probes[0].grad
        if gradient is None or gradient.layout is not torch.strided or gradient._version == self._version:
            return False
        return not bool(gradient.any()) or not bool(gradient.isfinite().all())

    def _skip_step(self, count: int, scalars: dict[str, Any]) -> None:
        """An optimizer under GradScaler calls no hook when it skips a step over an inf."""
        self.step += 1
        self._done = Job(self.step, False, scalars, micro_steps=self._watch.take(count), skipped=True)
        self._hand_over()
        self._watch.capturing = self._routing and self._wants(self.step + 1)

    def _on_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to update, and its gradients are complete."""
        self._raise_if_strict()
        self._tell_first_error()
        if self._budget_spent and self.on_step is None:
            return
        if any(optimizer is one for one in self._open):
            self._finish_step()
        if not self._open:
            self._hand_over()
            self._begin_step()
        self._open.append(optimizer)
        if self._job is not None:
            self._take_gradients(self._job, optimizer)
        if self._hooks.complete(self._open):
            self._finish_step()

    def _begin_step(self) -> None:
        self._drop_thrown_away()
        self._held = None
        self.step += 1
        micro_steps = self._watch.take()
        job = Job(self.step, self._wants(self.step), self._scalars, micro_steps=micro_steps)
        self._job, self._scalars = job, {}
        if not job.recorded:
            return
        if not self._checked and self._routing:
            check_micro_steps(self._watch, micro_steps)
            self._watch.settle(micro_steps)
        if self._sink is not None and not self._budget_spent:
            self._find_room(job, self._sink)

    def _find_room(self, job: Job, sink: TraceSink) -> None:
        """Get the job its place in the budget and the queue, or make it one of scalars only."""
        if not self._planned:
            self.plan.learn(job.micro_steps)
            self.plan.check_room()
            self._notify(self.plan.sentence(self.path))
            self._planned = True
        job.estimated_bytes = self.plan.step_bytes + (0 if self._checked else self.plan.snapshot_bytes)
        if not self.plan.has_room(sink.bytes_used, job.estimated_bytes):
            self._end_recording(job, sink)
        elif sink.reserve():
            job.reserved = True
        else:
            job.recorded = self.on_step is not None
            job.scalars["dropped"] = True

    def _end_recording(self, job: Job, sink: TraceSink) -> None:
        self._notify(
            f"the budget of {format_bytes(self.at.budget_bytes or 0)} is reached: recording ends after "
            f"{self.recorded_steps} steps, before step {job.step}; training goes on"
        )
        closing = self._snapshot(job.step)  # the weights as the last recorded step left them
        closing.scalars.update(job.scalars)
        sink.put(closing)
        self._budget_spent = True
        if self.on_step is None:
            self._job = None
            self._watch.remove()

    # -------------------------------------------------------------------------------------- gradients of a step

    def _take_gradients(self, job: Job, optimizer: torch.optim.Optimizer) -> None:
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if found_inf is not None and (self._device.type == "cpu" or not self._checked or self.on_step is not None):
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
            self._copy(job, optimizer, mine, scale)
        if self.on_step is not None:
            for name, (_, gradient) in mine.items():
                self._live[name] = gradient if gradient is None or scale is None else gradient / scale

    def _copy(
        self,
        job: Job,
        optimizer: torch.optim.Optimizer,
        mine: Mapping[str, tuple[nn.Parameter, Tensor | None]],
        scale: Tensor | None,
    ) -> None:
        transfer, streams = self._transfer, self.at.streams
        hidden = getattr(optimizer, "grad_buffer", None)  # where history is not in `.grad` itself
        transfer.begin(job.estimated_bytes)
        if not self._checked:
            state = initial_state([optimizer], {name: parameter for name, (parameter, _) in mine.items()})
            job.tensors += [(stream, name, transfer.copy(value.detach())) for stream, name, value in state]
        for name, (parameter, gradient) in mine.items():
            if not self._checked or "weight" in streams:
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

    def _finish_step(self) -> None:
        """Every optimizer of this step has shown its gradients."""
        job, self._job, self._open = self._job, None, []
        if job is not None:
            if job.norm is not None:
                job.scalars["grad_norm"] = job.norm
            job.scalars.setdefault("lr", group_rates(self._hooks.optimizers))
            if job.recorded and not job.skipped:
                self._finish_recorded(job)
            self._done = job
        self._live = {}
        self._prepare_next()

    def _finish_recorded(self, job: Job) -> None:
        if job.reserved and not self._checked and "gradient" in self.at.streams:
            check_gradients(job.absent, [self._infos[name] for name in self._parameters])
        if not self._checked and self._sink is not None:
            names = {id(parameter): name for name, parameter in self._all_parameters.items()}
            run = describe_run(self._model, self._hooks.optimizers, names, self._device)
            streams = (*self.at.streams, *sorted({s for s, _, _ in job.tensors if s.startswith("state.")}))
            self._sink.start(self._header(run, streams))
        self._checked = True
        self.recorded_steps += 1
        if self.on_step is not None:
            for wait in job.ready:
                wait()  # the routing went to the host on the side stream
            rates = dict(self._rate_of_each())
            self.on_step(live_views(job, self._infos, self._parameters, self._live, self.layers, rates))

    def _header(self, run: dict[str, Any], streams: Sequence[str]) -> Header:
        return Header(
            params=tuple(self.params),
            layers=self.plan.layer_infos(),
            streams=tuple(dict.fromkeys(streams)),
            run=run,
            record=self.at.to_json(),
            provenance=self._provenance,
        )

    def _rate_of_each(self) -> list[tuple[str, Any]]:
        by_id = {id(parameter): name for name, parameter in self._parameters.items()}
        groups = [group for optimizer in self._hooks.optimizers for group in optimizer.param_groups]
        return [(by_id[id(p)], group.get("lr")) for group in groups for p in group["params"] if id(p) in by_id]

    # ------------------------------------------------------------------------------------------- to the writer

    def _hand_over(self) -> None:
        job, self._done = self._done, None
        if job is not None and self._sink is not None and not (self._budget_spent and not job.reserved):
            job.recorded = job.recorded and job.reserved  # a dropped step may still have been live
            job.ready.append(self._transfer.mark())
            self._sink.put(job)

    def _snapshot(self, step: int) -> Job:
        """The recorded parameters' weights as they are now, as the closing snapshot of step `step`."""
        job = Job(step, False, {}, closing=True, estimated_bytes=self.plan.snapshot_bytes)
        self._transfer.begin(job.estimated_bytes)
        for name, parameter in self._parameters.items():
            job.tensors.append(("weight", name, self._transfer.copy(parameter.detach())))
        job.ready.append(self._transfer.end())
        return job

    def _tell_misfits(self) -> None:
        if steps := self._assembler.misfits:
            self._notify(
                f"the attention mask did not fit the routed tokens in {len(steps)} steps, first in step {steps[0]}; "
                "all their tokens are recorded as real; call reel.mask(mask) with one entry per routed token"
            )

    def _tell_first_error(self) -> None:
        """The writer thread could not write a step: say so while something can still be done about it."""
        error = self._sink.first_error if self._sink is not None else None
        if error is not None and not self._told_error:
            self._told_error = True
            self._notify(
                f"a step could not be written to {str(self.path)!r} ({type(error).__name__}: {error}); training goes "
                "on, later steps are tried again, what is lost is counted"
            )

    def _raise_if_strict(self) -> None:
        if self.strict and self._sink is not None and (self._sink.first_error is not None or self._sink.dropped):
            error = self._sink.first_error
            why = (
                f"{type(error).__name__}: {error}" if error is not None else f"{self._sink.dropped} steps were dropped"
            )
            raise GradreelError(
                f"recording to {str(self.path)!r} failed ({why}); strict=True ends training here"
            ) from error


def _to_stderr(message: str) -> None:
    print(f"gradreel: {message}", file=sys.stderr, flush=True)
