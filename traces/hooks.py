"""What the model does in forward: executed expert ids of every MoE layer, per micro-step.

Hooks return None, because a returned value would replace a module's output; they never wait for the device; they look
away in evaluation, in generation and in the recomputation of activation checkpointing.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from traces.errors import GradreelError
from traces.executed_ids import Capture, flatten, read_experts_call, read_router_output, topk_lowest_first
from traces.layouts import MoELayer, check_visible


class MicroStep:
    """One training forward: captures by layer, attention mask, tokens seen by the first MoE layer.

    `decoder_mask` is the mask of the decoder's layers where the model has an encoder too. `reached` turns True when a
    backward pass goes through this forward; `linked` says that this can be known.
    """

    __slots__ = (
        "added",
        "by_experts",
        "by_router",
        "decoder_mask",
        "linked",
        "mask",
        "reached",
        "rows_by_expert",
        "tokens",
    )

    def __init__(self, mask: Tensor | None, decoder_mask: Tensor | None = None) -> None:
        self.mask, self.decoder_mask = mask, decoder_mask
        self.tokens = 0
        self.added: dict[str, tuple[Tensor, Tensor]] = {}  # by parameter, see micro_norms.py
        self.linked = self.reached = False
        self.by_experts: dict[int, Capture] = {}
        self.by_router: dict[int, Capture] = {}
        self.rows_by_expert: dict[int, dict[int, int]] = {}

    def mark(self, gradient: Tensor) -> None:
        """Tensor hook: a backward pass came through."""
        self.reached = True

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by what `copy` makes of it."""
        if self.mask is not None:
            self.mask = copy(self.mask)
        if self.decoder_mask is not None:
            self.decoder_mask = copy(self.decoder_mask)
        for capture in (*self.by_experts.values(), *self.by_router.values()):
            for name in ("topk_expert_ids", "scores", "logits"):
                tensor = getattr(capture, name)
                if tensor is not None:
                    setattr(capture, name, copy(tensor))

    def capture(self, layer: MoELayer) -> Capture | None:
        """Ids, scores and logits of one layer, or None where its hooks saw no ids."""
        seen, routed = self.by_experts.get(layer.layer), self.by_router.get(layer.layer)
        if routed is None or seen is None:
            return seen or routed
        return Capture(seen.topk_expert_ids, seen.scores, routed.logits)

    def mask_of(self, layer: MoELayer) -> Tensor | None:
        """Which of the layer's tokens are real (True); None where all are."""
        return self.decoder_mask if layer.in_decoder else self.mask


class ForwardWatch:
    """The forward hooks of one model.

    `capturing` (set by the recorder before each step) switches from counting tokens to keeping ids. `begin` is called
    at each training forward of the whole model, before anything runs.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[MoELayer], streams: Sequence[str], begin: Callable[[], None]
    ) -> None:
        self.root = _innermost(model)
        self.layers = list(layers)
        check_visible(self.layers)
        self.keep_scores, self.keep_logits = "scores" in streams, "logits" in streams
        self.capturing = True
        self.frozen = False
        self.root_seen = False
        self.micro_steps: list[MicroStep] = []
        self.next_mask: Tensor | None = None
        self._begin = begin
        self._active = self._aside = False
        self._autocast: list[tuple[str, torch.dtype]] = []  # device type and dtype, of the last training forward
        self._handles: list[Any] = []
        self._router_handles: dict[int, Any] = {}
        arguments = _arguments_of(self.root)
        self._mask_position = arguments.index("attention_mask") if "attention_mask" in arguments else None
        for layer in self.layers:  # an encoder's mask says nothing about a decoder's tokens
            layer.in_decoder = "decoder_attention_mask" in arguments and "decoder" in layer.experts_name.split(".")

    def install(self) -> None:
        """Add the hooks. They work under `torch.compile` if the model was not called before."""
        add = self._handles.append
        before = torch.compiler.disable(self._before_root)
        add(self.root.register_forward_pre_hook(before, with_kwargs=True))
        add(self.root.register_forward_hook(torch.compiler.disable(self._after_root), always_call=True))
        for order, layer in enumerate(self.layers):
            first = order == 0
            hook = torch.compiler.disable(self._experts_hook(layer, first))
            for module in layer.containers.values():
                if type(module) not in (nn.ModuleList, nn.ModuleDict):
                    add(module.register_forward_pre_hook(hook, with_kwargs=True))
                    break
            read_at = layer.read_at or layer.router
            if read_at is not None:
                handle = read_at.register_forward_hook(
                    torch.compiler.disable(self._router_hook(layer, first)), with_kwargs=True
                )
                self._router_handles[layer.layer] = handle
            if layer.is_list and layer.global_expert_ids is None:  # else others send rows to these experts too
                for index, expert in enumerate(layer.experts.children()):
                    counter = torch.compiler.disable(self._row_hook(layer, index))
                    add(expert.register_forward_pre_hook(counter, with_kwargs=True))

    def remove(self) -> None:
        """Take every hook away."""
        for handle in (*self._handles, *self._router_handles.values()):
            handle.remove()
        self._handles, self._router_handles = [], {}

    def settle(self, micro_steps: Sequence[MicroStep]) -> None:
        """After a step that passed its check: drop router hooks whose layer is read at the experts module."""
        if self.keep_logits:
            return
        for layer in self.layers:
            seen = all(layer.layer in micro.by_experts for micro in micro_steps)
            if seen and layer.read is None and layer.layer in self._router_handles:
                self._router_handles.pop(layer.layer).remove()

    def begin_late(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The call of `module` that is under way collected its hooks before ours were added. Only the root's counts."""
        if module is self.root:
            self._before_root(module, args, kwargs)

    def take(self, count: int | None = None) -> list[MicroStep]:
        """Take the first `count` micro-steps (default: all); return those that took part in training."""
        taken, self.micro_steps = self.micro_steps[:count], self.micro_steps[len(self.micro_steps[:count]) :]
        return [micro for micro in taken if micro.reached or not micro.linked]

    @contextlib.contextmanager
    def aside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[MicroStep]:
        """Within it, a forward of the model with these arguments is captured in the micro-step given, and only there.

        One micro-step of its own takes the place of the training's, whose counts and masks are left as they are.
        """
        kept = (self.micro_steps, self.capturing, self._active, self.frozen, self.next_mask)
        self.next_mask = None
        micro = MicroStep(self._mask_of(args, kwargs), _as_mask(kwargs.get("decoder_attention_mask")))
        self.micro_steps, self.capturing, self._active, self.frozen, self._aside = [micro], True, True, False, True
        try:
            yield micro
        finally:
            self.micro_steps, self.capturing, self._active, self.frozen, self.next_mask = kept
            self._aside = False

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The autocast of the last training forward."""
        with contextlib.ExitStack() as stack:
            for device_type, dtype in self._autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=False))
            yield

    # hooks

    def _before_root(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._aside:
            return
        self.root_seen = True
        self._active = module.training and torch.is_grad_enabled() and not self.frozen and not _recomputing()
        if not self._active:
            return
        types = [t for t in ("cpu", "cuda") if torch.is_autocast_enabled(t)]
        self._autocast = [(t, torch.get_autocast_dtype(t)) for t in types]
        self._begin()
        self.micro_steps.append(MicroStep(self._mask_of(args, kwargs), _as_mask(kwargs.get("decoder_attention_mask"))))

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if not _recomputing() and not self._aside:
            self._active = False

    def _experts_hook(self, layer: MoELayer, first: bool) -> Callable[..., None]:
        number, dtype, keep_scores = layer.layer, _narrow(layer.num_experts), self.keep_scores

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not (first or self.capturing):
                return
            micro = self._open_micro_step(module, number, at_router=False)
            if micro is None:
                return
            capture = read_experts_call(args, kwargs, layer.num_experts)
            if capture is None or capture.topk_expert_ids is None:
                return
            if first:
                self._link(micro, capture, args)
            if self.capturing:
                micro.by_experts[number] = _kept(capture, dtype, keep_scores)

        return hook

    def _router_hook(self, layer: MoELayer, first: bool) -> Callable[..., None]:
        number, dtype, keep_scores = layer.layer, _narrow(layer.num_experts), self.keep_scores
        read = layer.read

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not (first or self.capturing):
                return
            micro = self._open_micro_step(module, number, at_router=True)
            if micro is None:
                return
            linked_by = args
            if read is not None:
                ids, scores, logits = read(module, args, kwargs, output)
                # What was made here is no part of the graph, what came out of the module may be.
                capture = Capture(ids, None if scores is None else scores.detach(), logits)
                linked_by = (*flatten(output), *args)
                if logits is not None:
                    capture.logits = logits.detach()
            else:
                capture = read_router_output(output, layer.num_experts)
            if first:
                self._link(micro, capture, linked_by)
            if self.capturing:
                if capture.topk_expert_ids is None and capture.logits is not None and layer.top_k:
                    # Only logits came out: the choice is rebuilt, and checked against the rows each expert was given.
                    capture.topk_expert_ids = topk_lowest_first(capture.logits, layer.top_k)
                    capture.extra["rebuilt"] = True
                kept = _kept(capture, dtype, keep_scores) if capture.topk_expert_ids is not None else Capture()
                kept.extra = capture.extra
                if not layer.top_k and layer.is_list and capture.topk_expert_ids is None and capture.logits is not None:
                    kept.extra["unranked"] = capture.logits.detach().reshape(-1, layer.num_experts).clone()
                if self.keep_logits and capture.logits is not None:
                    logits = capture.logits.detach().reshape(-1, layer.num_experts)
                    kept.logits = logits.to(torch.float32, copy=True)
                micro.by_router[number] = kept

        return hook

    def _row_hook(self, layer: MoELayer, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.capturing or not self.micro_steps or _recomputing():
                return
            tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            if tensor is not None and (self._active or not self.root_seen):
                rows = self.micro_steps[-1].rows_by_expert.setdefault(layer.layer, {})
                rows[index] = rows.get(index, 0) + tensor.shape[:-1].numel()

        return hook

    def _open_micro_step(self, module: nn.Module, number: int, at_router: bool) -> MicroStep | None:
        """The micro-step that a firing hook belongs to, or None where this forward does not count."""
        if _recomputing() or self.frozen:
            return None
        if self._active:
            micro = self.micro_steps[-1]
            seen = micro.by_router if at_router else micro.by_experts
            return None if number in seen else micro  # the second guard against a recomputed forward
        if self.root_seen or not (module.training and torch.is_grad_enabled()):
            return None
        # The parts of the model are called one by one: a layer that comes again begins the next micro-step.
        last = self.micro_steps[-1] if self.micro_steps else None
        if last is None or number in (last.by_router if at_router else last.by_experts):
            if last is None:
                self._begin()
            self.micro_steps.append(MicroStep(self._mask_of((), {})))
        return self.micro_steps[-1]

    def _link(self, micro: MicroStep, capture: Capture, args: tuple[Any, ...]) -> None:
        rows = capture.topk_expert_ids if capture.topk_expert_ids is not None else capture.logits
        if rows is not None:
            micro.tokens = rows.shape[:-1].numel()
        if micro.linked or not torch.is_grad_enabled():  # reentrant checkpointing builds no graph here
            return
        for tensor in (capture.scores, capture.logits, *args):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(micro.mark)
                micro.linked = True
                return

    def _mask_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        mask, self.next_mask = self.next_mask, None
        if mask is None:
            mask = kwargs.get("attention_mask")
        if mask is None and self._mask_position is not None and len(args) > self._mask_position:
            mask = args[self._mask_position]
        return _as_mask(mask)


def check_micro_steps(watch: ForwardWatch, micro_steps: Sequence[MicroStep]) -> None:
    """Raise `GradreelError` naming the module where a hook stayed silent or saw what cannot be."""
    if not micro_steps:
        names = ", ".join(repr(layer.experts_name) for layer in watch.layers[:3])
        raise GradreelError(
            f"no training forward was seen before the first optimizer step: the hooks on {names} stayed silent; if the "
            "model is compiled, enter the Recorder before its first call; forwards in eval mode or under no_grad "
            "do not count"
        )
    for layer in watch.layers:
        _find_top_k(layer, micro_steps)
    for micro in micro_steps:
        for layer in watch.layers:
            _check_layer(layer, micro)


def _find_top_k(layer: MoELayer, micro_steps: Sequence[MicroStep]) -> None:
    """Of listed experts whose K nobody states: as many rows as they were given in all, per token."""
    routed = [(micro, micro.by_router[layer.layer]) for micro in micro_steps if layer.layer in micro.by_router]
    routed = [(micro, capture) for micro, capture in routed if "unranked" in capture.extra]
    tokens = sum(len(capture.extra["unranked"]) for _, capture in routed)
    given = sum(sum(micro.rows_by_expert.get(layer.layer, {}).values()) for micro, _ in routed)
    if tokens and given and given % tokens == 0 and given // tokens <= layer.num_experts:
        layer.top_k = given // tokens
        for _, capture in routed:
            ids = topk_lowest_first(capture.extra.pop("unranked"), layer.top_k)
            capture.topk_expert_ids, capture.extra["rebuilt"] = ids.to(_narrow(layer.num_experts)), True


def _check_layer(layer: MoELayer, micro: MicroStep) -> None:
    capture = micro.capture(layer)
    if capture is None or capture.topk_expert_ids is None:
        heard = "the router gave no expert ids" if layer.layer in micro.by_router else "its hooks stayed silent"
        if layer.router is None and layer.read_at is None and layer.is_list:
            heard = "no router module was found beside it"
        unranked = micro.by_router[layer.layer].extra.get("unranked") if layer.layer in micro.by_router else None
        if unranked is not None:
            rows = sum(micro.rows_by_expert.get(layer.layer, {}).values())
            heard = (
                f"the experts were given {rows} tokens for {len(unranked)}, which is no top K of the router's logits,"
            )
        raise GradreelError(
            f"module {layer.experts_name!r}: {heard} in a training forward; if the model is compiled, enter the "
            "Recorder before its first call; else declare how ids are read, "
            "layout=Layout(experts=..., router=..., top_k=..., read=...)"
        )
    if capture.logits is not None and capture.logits.numel():
        sums = capture.logits.sum(dim=-1)
        layer.gives_probabilities = bool(capture.logits.min() >= 0 and (sums - 1).abs().max() < 1e-2)
    ids = capture.topk_expert_ids
    tokens, top_k = ids.shape
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if low < -1 or high > layer.num_experts or top_k > layer.num_experts:
        raise GradreelError(
            f"module {layer.experts_name!r}: expert ids from {low} to {high} in {top_k} slots do not fit "
            f"{layer.num_experts} experts; declare them, layout=Layout(experts=..., num_experts=..., read=...)"
        )
    mask = micro.mask_of(layer)
    if mask is not None and mask.numel() != tokens:
        raise GradreelError(
            f"module {layer.experts_name!r}: routed {tokens} tokens, the attention mask has {tuple(mask.shape)}; "
            "call reel.mask(mask) before each forward, with one entry per routed token in their order"
        )
    chosen, given = given_rows(layer, micro)
    if chosen != given:
        raise GradreelError(
            f"module {layer.experts_name!r}: the router chose {chosen} tokens per expert, the experts were given "
            f"{given}; declare how executed ids are read, layout=Layout(experts=..., router=..., read=...)"
        )


def given_rows(layer: MoELayer, micro: MicroStep) -> tuple[list[int], list[int]]:
    """Tokens per expert by the ids that were read at the router, and by what each module of a list was called with.

    Both empty where there is nothing to compare: stacked experts, ids read where the experts are called, a declared
    `read`, and a list whose every expert runs on every token.
    """
    rows, routed = micro.rows_by_expert.get(layer.layer), micro.by_router.get(layer.layer)
    if rows is None or routed is None or routed.topk_expert_ids is None:
        return [], []
    if layer.layer in micro.by_experts or layer.read is not None:
        return [], []
    ids = routed.topk_expert_ids.cpu().numpy().reshape(-1)
    with_weights = layer.num_experts - layer.zero_experts
    chosen = np.bincount(ids[(ids >= 0) & (ids < layer.num_experts)], minlength=layer.num_experts).tolist()
    given = [rows.get(index, 0) for index in range(layer.num_experts)]
    if not routed.extra.get("rebuilt") and set(given[:with_weights]) == {len(routed.topk_expert_ids)}:
        return [], []
    return chosen[:with_weights], given[:with_weights]


def _kept(capture: Capture, dtype: torch.dtype, keep_scores: bool) -> Capture:
    ids = capture.topk_expert_ids
    assert ids is not None
    slots = ids.shape[-1] if ids.ndim > 1 else 1
    scores = capture.scores.detach().reshape(-1, slots).clone() if keep_scores and capture.scores is not None else None
    # A copy, in the narrow type: what the model does to its own tensor later is not what it executed.
    return Capture(ids.detach().reshape(-1, slots).to(dtype, copy=True), scores)


def _narrow(num_experts: int) -> torch.dtype:
    return torch.int16 if num_experts < 2**15 - 1 else torch.int32


def _recomputing() -> bool:
    """Whether this runs inside a backward pass, as the recomputation of activation checkpointing does."""
    return bool(torch._C._current_graph_task_id() >= 0)


def _innermost(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and `torch.compile` wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and len(list(model.children())) == 1:
            inner = dict(model.named_children()).get("module")
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _arguments_of(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []


def _as_mask(mask: Any) -> Tensor | None:
    """Only [B, S] says which tokens are padding; a mask of pairs of positions does not."""
    return mask.detach().ne(0) if isinstance(mask, Tensor) and mask.ndim <= 2 else None
