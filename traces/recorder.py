"""Record a live training run: two lines around the user's loop, and no change of the loop.

    with Recorder("olmoe.trace", model, optimizer) as reel:
        train(model, optimizer)

Forward hooks see the executed expert ids, the optimizer's step pre-hook sees the gradients; one writer thread does the
rest. A recording that cannot go on ends with a notice; the training it watches goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from traces._store import as_place
from traces.backward_watch import BackwardWatch
from traces.checks import check_arguments, check_gradients, check_sharing, check_types, choose_parameters, layers_here
from traces.errors import GradreelError
from traces.expert_sample import ExpertSample
from traces.gradient_sources import AnnouncedSteps, GradientSource, check_source
from traces.gradients import GradientCopier
from traces.hooks import ForwardWatch, check_micro_steps
from traces.live import live_views
from traces.micro_norms import MicroNorms
from traces.notices import Notices
from traces.part_sample import PartSample
from traces.plan import Plan
from traces.probe import ProbeBatch
from traces.record_at import RecordAt, format_bytes
from traces.records import Assembler, Job
from traces.roles import describe_params, named_parameters
from traces.run_info import describe_run, group_rates, rates_by_name
from traces.scalars import why_not_kept
from traces.schema import Header, header_to_json
from traces.sharing import Names, Sharing
from traces.sink import TraceSink
from traces.spool import transfer_for
from traces.statistics import GradientStatistics
from traces.step_hooks import StepHooks
from traces.views import ParamInfo, StepCallback


class Recorder:
    """Record `model`'s routing and gradients into the new folder `path`, as a context manager.

    `optimizer` None watches every optimizer of the process that holds parameters of this model, which is the way for
    loops that hide theirs; several may be given as a list. `at` says what and when. `layout` declares MoE layers that
    are not recognised (`traces.layouts.Layout`). `on_step(views)` is called at each recorded step, before the update,
    with StepViews whose tensors are lent; with it `path` may be None, and nothing is written. `roles` overrides roles
    by parameter name or pattern. `statistics` computes the stream of that name (`toolkit.kernels.step_statistics`, say;
    default: plain torch, see `traces.statistics`). `probe` is the batch of the stream "probe": a tensor, a tuple of the
    model's arguments, or a dict of its keyword arguments. Of several processes (torch.distributed, initialised before)
    each enters a Recorder of its own on the same `path` and writes its part: what DDP replicates once, the shards of
    FSDP2 and of DTensors where they lie, its own tokens; a rank whose tokens another rank has too (tensor parallelism)
    leaves "routing" out of its streams. `global_names` maps local parameter names, or prefixes of them, to those of the
    whole run, where the stages of a pipeline count from 0. `gradients` is a `traces.gradient_sources.GradientSource`,
    for frameworks that keep gradients elsewhere; then `before_step()` announces each step. A full queue of
    `queue_steps` steps blocks training (`when_full="block"`) or loses the step and counts it (`"drop"`). Errors of the
    disk lose steps, are counted and told at the end; `strict=True` raises them in the training loop instead. `notify`
    receives notices (default: stderr).

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
        probe: Any = None,
        gradients: GradientSource | None = None,
        global_names: Names | None = None,
        when_full: str = "block",
        queue_steps: int = 4,
        notify: Callable[[str], None] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        check_types(path, model, at, roles)
        self.at = at if at is not None else RecordAt()
        self.path = None if path is None else as_place(path)
        self.on_step, self.strict = on_step, strict
        self.step = self.recorded_steps = 0
        self._notices = Notices(notify, self.path, strict)
        check_arguments(self.path, self.at, on_step, statistics, probe)
        if gradients is not None:
            check_source(gradients, self.at.budget, when_full, optimizer)
        self.layers = layers_here(model, layout)
        if not self.layers:
            self._notices.tell(
                "this process holds no MoE layer that is recognised; it records what the policy names beside them"
            )
        infos, parameters = describe_params(model, roles, layout if self.layers else None), named_parameters(model)
        self._sharing = Sharing(infos, parameters, self.layers, global_names, gradients)
        self._sharing.look_for_ddp(model)
        check_sharing(model, self._sharing, self.at)
        self.params: list[ParamInfo] = self._sharing.params  # of the whole run; what lies here:
        self._infos = self._sharing.local
        self._model, self._provenance = model, dict(provenance or {})
        self._all_parameters = self._sharing.parameters
        self._parameters = choose_parameters(self.params, self._all_parameters, self.at, self._sharing.several)
        self._device = next(iter((self._parameters or self._all_parameters).values())).device
        mine = [self._infos[name] for name in self._parameters if self._sharing.writes(name)]
        self.plan = Plan(self.at, mine, self.layers, queue_steps, probe)
        for layer in self.layers:
            self.at.choose_experts(layer.num_experts)  # an id that is no expert is told now
        self._routing = "routing" in self.at.streams
        self._transfer = transfer_for(self._device)
        self._watch = ForwardWatch(model, self.layers, self.at.streams, self._on_forward)
        watched = self._parameters or self._all_parameters  # a stage of a pipeline may have nothing to record
        self._hooks = StepHooks(watched, optimizer, self._on_gradients, self._in_closure, self._on_switch)
        self._announced = None if gradients is None else AnnouncedSteps(gradients, parameters.values())
        if self._announced is not None:
            self._hooks.only(self._announced)
        streams = self.at.streams
        self._micro_norms = MicroNorms(self._infos, self._parameters, self._watch) if "micro_norms" in streams else None
        self._probe = (
            ProbeBatch(probe, self._watch, self._device) if "probe" in streams and self._sharing.rank == 0 else None
        )
        self._sample = (
            PartSample(self.at, self.layers, self._device, self._sharing)
            if self._sharing.is_split
            else ExpertSample(self.at, self.layers, self._device)
        )
        self._copier = GradientCopier(
            self.at,
            self._infos,
            self._hooks,
            self._transfer,
            self._device,
            self._sample,
            self._sharing,
            statistics=GradientStatistics(statistics, self.at.pair_elements) if "statistics" in streams else None,
            micro_norms=self._micro_norms,
            live=on_step is not None,
        )
        self._sink: TraceSink | None = None
        if self.path is not None:
            self.plan.check_room()
            header_to_json(self._header({}, self.at.streams))  # what cannot be written is told now
            self._assembler = Assembler(self._infos, self.layers, self._transfer.pool, self.at, self._sharing)
            # Absolute: a script that changes its folder goes on writing where it began.
            self._sink = TraceSink(self.path.absolute(), self._assembler, when_full, queue_steps)
        self._scalars: dict[str, Any] = {}
        self._entered = self._over = False
        self._open: list[torch.optim.Optimizer] = []  # that took part in the step `_job` so far
        self._job: Job | None = None
        self._done: Job | None = None  # finished, and open for late scalars until the next forward
        self._planned = self._checked = self._budget_spent = False
        self._backward = BackwardWatch(self.params, self._all_parameters)

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
            else:
                self._notices.tell_once(key, f"reel.log: {why}; it is left out, all else is recorded")
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

    def before_step(self) -> None:
        """With `gradients=`: this rank's gradients are reduced, and the optimizer is about to step."""
        if self._announced is None:
            raise GradreelError("before_step() belongs to Recorder(..., gradients=...); torch's optimizers are watched")
        if not self._over:
            self._on_gradients(self._announced)  # type: ignore[arg-type]

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
        """Memory of the recording so far: host buffers for copies, and on the device the step before (statistics)."""
        kept = self._copier.statistics.kept_bytes if self._copier.statistics is not None else 0
        return self._transfer.pool.allocated_bytes + kept

    def __enter__(self) -> Recorder:
        if self._entered:
            raise GradreelError("this Recorder was entered before; one Recorder makes one recording, build another")
        if self._sink is not None:
            self._sink.open()
        self._entered = True
        self._watch.install()
        self._hooks.install()
        self._backward.install()
        if self._micro_norms is not None:
            self._micro_norms.install()
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
                self._close(self._sink, kind is None)
        finally:
            self._remove_hooks()
            if self._sink is not None:
                self._sink.close(self._notices.tell)
                self._notices.tell_misfits(self._assembler.misfits, self._assembler.misrouted)
        if kind is not None:
            return  # the user's own exception matters more than what the recording has to say
        if self.step == 0:
            raise GradreelError(
                f"no optimizer step was seen while recording; {self._sharing.why_silent(self._model)}enter the "
                "Recorder before training, and give it the optimizer that holds this model's parameters"
            )
        if self.recorded_steps == 0:
            raise GradreelError(
                f"none of {self.step} optimizer steps could be recorded: all were skipped over an inf, or "
                "dropped; train longer"
            )
        self._notices.raise_if_strict(self._sink)

    def _close(self, sink: TraceSink, sound: bool) -> None:
        """The weights and the probe as the last step left them."""
        closing = self._copier.snapshot(self.step + 1, self.plan.snapshot_bytes)
        if sound and self._probe is not None:
            self._route_probe(closing)
        if closing.tensors or closing.probe is not None or self._sharing.several:  # a step is one that all ranks have
            sink.put(closing)

    def _remove_hooks(self) -> None:
        self._watch.remove()
        self._hooks.remove()
        self._backward.remove()
        if self._micro_norms is not None:
            self._micro_norms.remove()

    # ------------------------------------------------------------------------------------------ a step begins

    def _wants(self, step: int) -> bool:
        return self.at.records(step) and (self.on_step is not None or not self._budget_spent)

    def _prepare_next(self) -> None:
        self._backward.seen = False
        self._watch.capturing = self._routing and self._wants(self.step + 1)
        if self._micro_norms is not None:
            self._micro_norms.active = self._wants(self.step + 1)

    def _on_switch(self, old: str, new: str) -> None:
        self._scalars["optimizer"] = new
        self._notices.tell_once(
            f"{old} to {new}",
            f"before step {self.step + 1} {new} took the place of {old}, whose parameters it steps; recording goes on "
            f"with {new}, the header describes {old}",
        )

    def _in_closure(self, inside: bool) -> None:
        self._watch.frozen = inside

    def _on_forward(self) -> None:
        """A training forward begins: the step before it is over, or its gradients were thrown away."""
        self._sharing.look_for_ddp()
        self._hooks.forget_unfinished()
        if self._open:
            self._finish_step()
        self._hand_over()
        self._drop_thrown_away()
        if self._watch.micro_steps and self._backward.seen and not self._backward.holds(len(self._watch.micro_steps)):
            scalars, self._scalars = self._scalars, {}
            self._skip_step(len(self._watch.micro_steps), scalars)

    def _drop_thrown_away(self) -> None:
        count = self._backward.thrown_away()
        if count is not None:
            self._skip_step(count, {})

    def _skip_step(self, count: int, scalars: dict[str, Any]) -> None:
        """An optimizer under GradScaler calls no hook when it skips a step over an inf."""
        self.step += 1
        self._done = Job(self.step, False, scalars, micro_steps=self._watch.take(count), skipped=True)
        self._hand_over()
        self._watch.capturing = self._routing and self._wants(self.step + 1)

    def _on_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is about to update, and its gradients are complete."""
        self._notices.raise_if_strict(self._sink)
        self._notices.tell_first_error(self._sink)
        if self._budget_spent and self.on_step is None:
            return
        if any(optimizer is one for one in self._open):
            self._finish_step()
        if not self._open:
            self._hand_over()
            self._begin_step()
        self._open.append(optimizer)
        if self._job is not None:
            self._copier.take(self._job, optimizer, first=not self._checked)
        if self._hooks.complete(self._open):
            self._finish_step()

    def _begin_step(self) -> None:
        self._drop_thrown_away()
        self._backward.forget()
        self.step += 1
        micro_steps = self._watch.take()
        job = Job(self.step, self._wants(self.step), self._scalars, micro_steps=micro_steps)
        self._job, self._scalars = job, {}
        if job.recorded and not self._checked and self._routing:
            check_micro_steps(self._watch, micro_steps)
            self._watch.settle(micro_steps)
        if job.recorded:
            self._sample.begin(self.step, micro_steps)
        probes, weighs = self.at.probes(self.step), self.at.weighs(self.step)
        wanted = job.recorded or probes or weighs or self._copier.statistics is not None
        if wanted and self._sink is not None and not self._budget_spent:
            self._find_room(job, self._sink, weighs or (job.recorded and not self._checked), probes)
        if probes and (job.reserved or (self.on_step is not None and job.recorded)):
            self._route_probe(job)

    def _route_probe(self, job: Job) -> None:
        """Route the probe batch; what goes wrong is an error at the first time, and the end of probing later."""
        if self._probe is None:
            return
        try:
            job.probe = self._probe.route()
        except Exception as error:
            if not self._checked:
                raise GradreelError(
                    f"probe: calling the model with it failed ({type(error).__name__}: {error}); give what the model's "
                    "forward takes, on any device"
                ) from error
            self._notices.tell(
                f"the probe batch could not be routed at step {job.step} ({type(error).__name__}: {error}); training "
                "and recording go on without probes"
            )
            self._probe = None
            return
        if not self._checked:
            self._probe.check(job.probe)
        self._transfer.begin(0)
        job.probe.to_host(self._transfer.small)
        job.ready.append(self._transfer.end())

    def _find_room(self, job: Job, sink: TraceSink, weighs: bool, probes: bool) -> None:
        """Get the job its place in the budget and the queue, or make it one of scalars only."""
        if not self._planned and job.recorded:
            self.plan.learn(job.micro_steps)
            self.plan.check_room()
            self._notices.tell(self.plan.sentence(self.path))
            self._planned = True
        job.estimated_bytes = self.plan.bytes_of(recorded=job.recorded, weighs=weighs, probes=probes)
        if not self.plan.has_room(sink.bytes_used, job.estimated_bytes):
            self._end_recording(job, sink)
        elif sink.reserve():
            job.reserved = True
        else:
            job.recorded = self.on_step is not None
            job.scalars["dropped"] = True

    def _end_recording(self, job: Job, sink: TraceSink) -> None:
        self._notices.tell(
            f"the budget of {format_bytes(self.at.budget_bytes or 0)} is reached: recording ends after "
            f"{self.recorded_steps} steps, before step {job.step}; training goes on"
        )
        # The weights as the last recorded step left them.
        closing = self._copier.snapshot(job.step, self.plan.snapshot_bytes)
        closing.scalars.update(job.scalars)
        sink.put(closing)
        self._budget_spent = True
        if self.on_step is None:
            self._job = None
            self._watch.remove()

    # ------------------------------------------------------------------------------------------- a step is over

    def _finish_step(self) -> None:
        """Every optimizer of this step has shown its gradients."""
        job, self._job, self._open = self._job, None, []
        if job is not None:
            for micro in job.micro_steps:
                micro.added.clear()
            if job.norm is not None:
                job.scalars["grad_norm_local" if self._sharing.several else "grad_norm"] = job.norm
            job.scalars.setdefault("lr", group_rates(self._hooks.optimizers))
            if job.recorded and not job.skipped:
                self._finish_recorded(job)
            self._done = job
        self._copier.live = {}
        self._prepare_next()

    def _finish_recorded(self, job: Job) -> None:
        if job.reserved and not self._checked and "gradient" in self.at.streams and not self._sharing.several:
            # Of several processes one may have no tokens for its experts.
            check_gradients(job.absent, [self._infos[name] for name in self._parameters])
        if not self._checked and self._sink is not None:
            names = {id(parameter): name for name, parameter in self._all_parameters.items()}
            run = describe_run(self._model, self._hooks.optimizers, names, self._device)
            streams = (*self.at.streams, *sorted({s for s, _, _ in job.tensors if s.startswith("state.")}))
            placements = self._sharing.placements(self._parameters)
            self._sink.start(self._header(run, streams), self._sharing.rank, placements)
        self._checked = True
        self.recorded_steps += 1
        if self.on_step is not None:
            for wait in job.ready:
                wait()  # the routing went to the host on the side stream
            rates = rates_by_name(self._hooks.optimizers, self._parameters)
            self.on_step(live_views(job, self._infos, self._parameters, self._copier.live, self.layers, rates))

    def _header(self, run: dict[str, Any], streams: Sequence[str]) -> Header:
        return Header(
            params=tuple(self.params),
            layers=self.plan.layer_infos(),
            ranks=self._sharing.world,
            streams=tuple(dict.fromkeys(streams)),
            run=run,
            record=self.at.to_json(),
            provenance=self._provenance,
        )

    # ------------------------------------------------------------------------------------------- to the writer

    def _hand_over(self) -> None:
        job, self._done = self._done, None
        if job is not None and self._sink is not None and not (self._budget_spent and not job.reserved):
            job.recorded = job.recorded and job.reserved  # a dropped step may still have been live
            job.ready.append(self._transfer.mark())
            self._sink.put(job)
