"""Training on routing that was recorded before: ids from the trace, gate weights from the live router.

Legend: E num_experts, K top_k, T tokens of one forward.

A model's own code computes logits and gate weights; only the choice in it, the `topk`, `sort` or `argmax` over the E
logits of each token, gives the recorded ids instead of the largest. So every family keeps its own formula for the
weights, to the last bit, and gradients reach the router through them. What an optimizer does through routing is then
taken out: arms on one recorded routing differ through weights alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from traces.errors import GradreelError, NotRecorded
from traces.executed_ids import flatten, read_experts_call
from traces.layouts import MoELayer, find_moe_layers
from traces.module_names import below, named_modules
from traces.reader import Trace, open_trace

if TYPE_CHECKING:
    from traces.layouts import Layout

_TOPK = {torch.topk, Tensor.topk}
_SORT = {torch.sort, Tensor.sort}
_ARGMAX = {torch.argmax, Tensor.argmax}


class RoutingReplay:
    """Within it, every training forward of `model` executes the expert ids that `trace` recorded.

        with RoutingReplay(model, "baseline.trace", optimizer):
            train(model, optimizer)

    The n-th training forward of a step takes the ids of the n-th recorded micro-step of that step; with `optimizer`
    steps are told apart by its calls, and one with fewer micro-steps than were recorded is an error; without it the
    recorded micro-steps simply follow each other. Recomputation under activation checkpointing, in both modes, gets
    the ids of its forward, as long as each backward pass follows its own forward. Forwards in eval mode or under
    no_grad choose by themselves. `first` is the recorded step to begin with, `rank` the recorded process.

    The trace must hold routing of every step that is trained, of the same batches: token counts are compared, and in
    the first step the ids that the experts are called with. Padding is routed as it was. Enter it before a model is
    compiled, and do not compile it: the choice inside compiled code is not seen, which is an error.

    Raises `GradreelError` of one line for a trace of another model (layers, E or K), for slots that were dropped (no
    forced choice can drop a slot), and during training where a step, a micro-step or a layer is missing, token counts
    differ, or a layer's choice could not be replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        trace: Trace | str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        layout: Layout | None = None,
        first: int | None = None,
        rank: int = 0,
    ) -> None:
        self.trace = trace if isinstance(trace, Trace) else open_trace(trace)
        if not self.trace.steps:
            raise GradreelError(f"{self._where}: no step is recorded, so there is no routing to train on")
        self.layers = find_moe_layers(model, layout)
        self.forced = 0  # choices that were replaced so far
        self._root, self._optimizer, self._rank = _innermost(model), optimizer, rank
        self._blocks = _blocks(self._root, self.layers)
        self._check_layers()
        self._first = self.trace.steps[0] if first is None else first
        self._step, self._micro = self._first, -1
        self._ids: dict[int, list[Tensor]] = {}  # by layer: those of each micro-step of the step
        self._load(self._step)
        self._active = False
        self._reached = True  # whether a backward pass went through the last training forward
        self._overlap = False
        self._handles: list[Any] = []
        self._modes: list[_Choice | None] = []

    def __enter__(self) -> RoutingReplay:
        add = self._handles.append
        add(self._root.register_forward_pre_hook(self._before_root))
        add(self._root.register_forward_hook(self._after_root, always_call=True))
        for layer, block in zip(self.layers, self._blocks, strict=True):
            add(block.register_forward_pre_hook(self._before_block(layer)))
            add(block.register_forward_hook(self._after_block(layer), always_call=True))
            if not layer.is_list:
                add(layer.experts.register_forward_pre_hook(self._at_experts(layer), with_kwargs=True))
        if self._optimizer is not None:
            add(self._optimizer.register_step_post_hook(self._after_step))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def _where(self) -> str:
        return f"routing of {str(self.trace.path)!r}"

    def _check_layers(self) -> None:
        """The trace's layers must be the model's, by number, E and K."""
        recorded = {layer.layer: layer for layer in self.trace.layers}
        for layer in self.layers:
            other = recorded.get(layer.layer)
            if other is None:
                raise GradreelError(
                    f"{self._where}: it has no layer {layer.layer} ({layer.experts_name}); its layers are "
                    f"{', '.join(map(str, recorded)) or 'none'}; record a run of the same model"
                )
            own = (layer.num_experts, layer.top_k or other.top_k)
            if own != (other.num_experts, other.top_k):
                raise GradreelError(
                    f"{self._where}: layer {layer.layer} has {other.num_experts} experts of which {other.top_k} run, "
                    f"the model {own[0]} and {own[1]}; record a run of the same model"
                )

    def _load(self, step: int) -> None:
        """Read the ids of `step`, each layer's as a list over micro-steps."""
        self._ids = {layer.layer: [] for layer in self.layers}
        if step not in self.trace.steps:
            first, last = self.trace.steps[0], self.trace.steps[-1]
            raise NotRecorded(
                f"{self._where}: step {step} is not recorded (steps {first} to {last}, {len(self.trace.steps)} of "
                "them); record every step that is to be trained"
            )
        for record in self.trace.routing_records(step, self._rank):
            if record.layer in self._ids:
                ids = torch.from_numpy(record.topk_expert_ids.astype("int64"))
                if ids.numel() and int(ids.min()) < 0:
                    raise GradreelError(
                        f"{self._where}: step {step}, layer {record.layer} dropped slots (id -1), which a forced "
                        "choice cannot do; record a run without a capacity"
                    )
                self._ids[record.layer].append(ids)

    def _here(self, layer: MoELayer) -> str:
        return f"{self._where}: step {self._step}, micro-step {self._micro}, layer {layer.layer}"

    # hooks

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if not (module.training and torch.is_grad_enabled()) or _recomputing():
            return
        self._overlap = not self._reached
        self._reached = False
        self._micro += 1
        counts = {len(ids) for ids in self._ids.values()}
        if self._optimizer is None and self._micro >= max(counts, default=0):
            later = [step for step in self.trace.steps if step > self._step]
            self._step, self._micro = (later[0] if later else self._step + 1), 0
            self._load(self._step)
        self._active = True

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._active or _recomputing():
            return
        self._active = False
        for tensor in flatten(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._mark)

    def _mark(self, gradient: Tensor) -> None:
        self._reached = True

    def _before_block(self, layer: MoELayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if not (self._active or _recomputing()):
                self._modes.append(None)
                return
            if _recomputing() and self._overlap:
                raise GradreelError(
                    f"{self._here(layer)}: recomputed after a later forward; under activation checkpointing call "
                    "backward after each forward"
                )
            recorded = self._ids[layer.layer]
            if self._micro >= len(recorded):
                raise NotRecorded(
                    f"{self._here(layer)}: only {len(recorded)} micro-steps are recorded; train with the recorded "
                    "number of micro-steps"
                )
            mode = _Choice(recorded[self._micro], layer.num_experts, self._here(layer))
            self._modes.append(mode)
            mode.__enter__()

        return hook

    def _after_block(self, layer: MoELayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            mode = self._modes.pop() if self._modes else None
            if mode is None:
                return
            mode.__exit__(None, None, None)
            if mode.used:
                self.forced += 1
            elif output is not None:  # None: the block failed by itself, and says so
                raise GradreelError(
                    f"{self._here(layer)}: {type(module).__name__} made no choice of {mode.ids.shape[1]} out of "
                    f"{layer.num_experts} by topk, sort or argmax that could be replaced; it cannot train on recorded "
                    "routing"
                )

        return hook

    def _at_experts(self, layer: MoELayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            mode = self._modes[-1] if self._modes else None
            if mode is None or self._step != self._first:  # comparing waits for the device, so it is done in one step
                return
            seen = read_experts_call(args, kwargs, layer.num_experts)
            if seen is None or seen.topk_expert_ids is None:
                return
            ids = seen.topk_expert_ids
            if not torch.equal(ids.reshape(-1, ids.shape[-1]).cpu().long(), mode.ids):
                raise GradreelError(
                    f"{self._here(layer)}: the experts were called with other ids than the recorded ones; "
                    f"{type(module).__name__} cannot train on recorded routing"
                )

        return hook

    def _after_step(self, *_: Any) -> None:
        for layer in self.layers:
            wanted = len(self._ids[layer.layer])
            if self._micro + 1 != wanted:
                raise GradreelError(
                    f"{self._where}: step {self._step} was recorded with {wanted} micro-steps and trained with "
                    f"{self._micro + 1}; train with the recorded number"
                )
        self._step, self._micro = self._step + 1, -1
        if self._step <= self.trace.steps[-1]:
            self._load(self._step)
        else:
            self._ids = {layer.layer: [] for layer in self.layers}


class _Choice(TorchFunctionMode):
    """Within it, the first choice of K out of E per token gives `ids` [T, K]; everything else is as ever."""

    def __init__(self, ids: Tensor, num_experts: int, where: str) -> None:
        super().__init__()
        self.ids, self.used = ids, False
        self._experts, self._where = num_experts, where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.used or not (func in _TOPK or func in _SORT or func in _ARGMAX):
            return func(*args, **kwargs)
        values = args[0] if args else kwargs.get("input")
        if not isinstance(values, Tensor) or values.ndim < 2 or values.shape[-1] != self._experts:
            return func(*args, **kwargs)
        plain = func(*args, **kwargs)
        top_k = self.ids.shape[1]
        tokens = values.shape[:-1].numel()
        wanted = top_k
        if func in _TOPK:
            wanted = plain.indices.shape[-1]
        elif func in _ARGMAX:
            wanted = 1 if plain.shape[: values.ndim - 1] == values.shape[:-1] else 0
        elif plain.indices.shape != values.shape:
            wanted = 0
        if wanted != top_k:  # a choice of groups of experts, or over another axis
            return plain
        if tokens != len(self.ids):
            raise GradreelError(
                f"{self._where}: {len(self.ids)} tokens are recorded, the model routes {tokens}; train on the recorded "
                "batches"
            )
        self.used = True
        ids = self.ids.to(values.device).reshape(*values.shape[:-1], top_k)
        if func in _ARGMAX:
            return ids.reshape(plain.shape)
        if func in _SORT:
            ids = _with_the_rest(ids, self._experts)
        kind = type(plain)
        return kind((values.gather(-1, ids), ids))


def _with_the_rest(ids: Tensor, num_experts: int) -> Tensor:
    """All E ids, those of `ids` [.., K] first and in their order, the rest ascending: [.., E]."""
    place = torch.arange(num_experts, device=ids.device).expand(*ids.shape[:-1], num_experts) + ids.shape[-1]
    ranks = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    return place.scatter(-1, ids, ranks).argsort(dim=-1)


def _blocks(root: nn.Module, layers: list[MoELayer]) -> list[nn.Module]:
    """For each layer the smallest module that holds both its router and its experts, where the choice is made."""
    modules = named_modules(root)
    found = []
    for layer in layers:
        shared = layer.block_name
        while layer.router_name is not None and not below(layer.router_name, shared):
            shared = shared.rpartition(".")[0]
        found.append(modules[shared])
    return found


def _recomputing() -> bool:
    """Whether this runs inside a backward pass, as the recomputation of activation checkpointing does."""
    return bool(torch._C._current_graph_task_id() >= 0)


def _innermost(model: nn.Module) -> nn.Module:
    """The model inside wrappers that only pass calls on."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and len(list(model.children())) == 1:
            inner = dict(model.named_children()).get("module")
        if not isinstance(inner, nn.Module):
            return model
        model = inner
