"""One recipe at work on one parameter.

Replay, ablations and `toolkit.optim` all step through here, so idle experts, layouts, compute dtype and random numbers
mean the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from toolkit.recipes._fused import can_run, fused_step
from toolkit.recipes._layout import Layout, Part, presence_masks, put, take
from toolkit.recipes._random import SlicedRng
from toolkit.recipes._recipe import IdlePolicy, Recipe
from toolkit.stages import Chain, Context, Ratio, Slot, Stage
from toolkit.stages._rng import CounterRng
from toolkit.stages._within import slots_of_stages
from traces.errors import GradreelError
from traces.views import ParamInfo

#: Elements that are stepped at once: of a stack of experts, and of any parameter whose chain is elementwise.
BLOCK = 1 << 24
#: Stages that treat every element alone.
ELEMENTWISE = frozenset(
    {"second_moment", "ema", "unbias", "heavy_ball", "hidden_ema", "sign", "divide", "coupled_decay", "lion", "apply"}
)
FLOATS = ("float64", "float32", "bfloat16", "float16")
STEP = "step"


def compute_dtype(info: ParamInfo) -> torch.dtype:
    """float64 for float64 parameters, float32 for all others."""
    return torch.float64 if info.dtype == "float64" else torch.float32


def slot_dtype(slot: Slot, info: ParamInfo) -> torch.dtype:
    """What a slot is stored in: as declared, but float64 where a float64 parameter meets a float32 slot."""
    if slot.dtype == "float32":
        return compute_dtype(info)
    return getattr(torch, slot.dtype)


def counter_shape(recipe: Recipe, chain: Chain, info: ParamInfo) -> tuple[int, ...] | None:
    """Shape of the step counter, int64: [E] where experts may be skipped, a scalar otherwise, None where none is kept.

    Chains that count no steps need one still where weights are rounded stochastically: it drives the random numbers.
    """
    rounds = info.dtype == "bfloat16" and chain.stages[-1].options.get("rounding") != "nearest"
    if not (chain.counts_steps or rounds):
        return None
    return (info.shape[info.expert_axis],) if info.expert_axis is not None and recipe.idle == "skip" else ()


def is_elementwise(chain: Chain) -> bool:
    """Whether no element of a parameter influences another."""
    return all(stage.name in ELEMENTWISE for stage in chain)


def couples_experts(stage: Stage) -> bool:
    """Whether a stage lets one expert influence another."""
    view = stage.options.get("view")
    return stage.options.get("clip_scope") == "tensor" or (view is not None and view.joins_experts)


class Stepper:
    """One recipe applied to one parameter.

    `chain` is the chain that serves the parameter; `state` holds its slots under the keys of `Chain.slots()`, in the
    canonical layout, and `step` (int64) where steps are counted. `rng` may be replaced by `StoredUniforms` to feed
    stored numbers; `first_element` is the index of the first element where the parameter is a shard of a larger one.
    `fused=True` lets one kernel take a step wherever it can and the direction is not asked for; `fused` is then the
    kernel's name, None where the chain runs. The chain is the default: a kernel differs from it by roundings.
    Errors: GradreelError for complex or integer parameters and for slots that the idle policy cannot take apart.
    """

    def __init__(
        self, recipe: Recipe, info: ParamInfo, *, device: Any = "cpu", seed: int = 0, fused: bool = False
    ) -> None:
        if info.dtype not in FLOATS:
            raise GradreelError(f"{info.name} is {info.dtype}; allowed: {', '.join(FLOATS)}")
        self.recipe, self.info, self.seed = recipe, info, seed
        self.chain = recipe.chain_for(info)
        kernel = fused_step(self.chain) if fused else None
        self.fused = kernel[0] if kernel else None
        self._kernel = kernel
        self.layout = Layout(info)
        self.idle: IdlePolicy = recipe.idle
        self.rng: Any = None
        self.first_element = 0
        self._keys = [key for key, _ in self.chain.slots()]
        self._slots = dict(self.chain.slots())
        self._per_expert = {key: self._has_expert_axis(slot) for key, slot in self._slots.items()}
        self.state: dict[str, Tensor] = {}
        for key, slot in self._slots.items():
            self.state[key] = self._zeros(slot, device)
        counter = counter_shape(recipe, self.chain, info)
        if counter is not None:
            self.state[STEP] = torch.zeros(counter, dtype=torch.int64)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state, without gradient buffers and step counters."""
        return self._bytes("state")

    @property
    def pinned_gradient_bytes(self) -> int:
        """Bytes of gradient buffers that must survive between steps."""
        return self._bytes("grad_buffer")

    @property
    def step_counter_bytes(self) -> int:
        """Bytes of step counters."""
        return self.state[STEP].nbytes if STEP in self.state else 0

    @property
    def buffer_key(self) -> str | None:
        """Key of the slot that lives in the gradient buffer, None if there is none."""
        return next((key for key, slot in self._slots.items() if slot.home == "grad_buffer"), None)

    @torch.no_grad()
    def step(
        self,
        weight: Tensor,
        gradient: Tensor | None,
        *,
        lr: float,
        presence: Any = None,
        tokens_per_expert: Any = None,
        gradient_in_buffer: bool = False,
        want_update: bool = False,
    ) -> Tensor | None:
        """Take one step: `weight` changes in place. `lr` is the recipe's base rate; the chain's `lr_scale` is applied.

        `weight` and `gradient` are in the parameter's own layout and dtype; a None gradient does nothing at all.
        `presence`: uint8 codes of `traces.views`, [E] or one; None: all present. `gradient_in_buffer`: `gradient` is
        the buffer slot, to which backward has added. Returns the direction before lr (parameter's layout, compute
        dtype; 0 for experts that did not step) if `want_update`.
        """
        if gradient is None:
            return None
        self._check(weight, gradient)
        if not gradient.numel():  # a rank that holds no expert, for instance
            return torch.zeros_like(gradient, dtype=compute_dtype(self.info)) if want_update else None
        w, x, wide = self.layout.canonical(weight), self.layout.canonical(gradient), compute_dtype(self.info)
        touched, busy = presence_masks(presence, self.layout.experts, self.info.name)
        chosen = self._choose(touched, busy)
        if chosen is not None and not bool(chosen.any()):
            return torch.zeros_like(self.layout.restore(x), dtype=wide) if want_update else None
        moving = busy if self.idle == "decay" and self.is_expert else None
        tokens = self._tokens(tokens_per_expert)
        count = self._advance(chosen)
        full = torch.zeros_like(x, dtype=wide) if want_update else None
        for part in self._parts(chosen, x):
            rows = isinstance(part, slice) and not self.layout.expert_stacked
            piece = take(w, part)
            slots = {k: take(t, part, rows or self._per_expert[k]) for k, t in self._slot_items()}
            ctx = Context(
                weight=piece,
                lr=float(lr) * self.chain.lr_scale,
                step=take(count, part) if isinstance(count, Tensor) else count,
                rng=self._random(count, part, x),
                expert_stacked=self.layout.expert_stacked,
                tokens_per_expert=None if tokens is None else take(tokens, part, self.layout.expert_stacked),
                gradient_in_buffer=gradient_in_buffer,
            )
            moves = None if moving is None else take(moving, part, not rows)
            # Widened part by part: a whole stack in float32 would be as large as the rest of a step.
            update = self._run(take(x, part).to(wide), slots, ctx, moves, want_update)
            if isinstance(part, Tensor):
                put(w, part, piece)
                for key, tensor in slots.items():
                    if self._per_expert[key]:
                        put(self.state[key], part, tensor)
            if full is not None:
                put(full, part, update)
        if self.layout.flattened:
            weight.copy_(self.layout.restore(w))
        return None if full is None else self.layout.restore(full)

    def _run(
        self, x: Tensor, slots: dict[str, Tensor], ctx: Context, moving: Tensor | None, want_update: bool
    ) -> Tensor | None:
        seen = want_update or moving is not None  # what a kernel keeps to itself
        if self._kernel is not None and not seen and can_run(self._kernel[0], x, slots, ctx):
            self._kernel[1](x, slots, ctx)
            return None
        parts = slots_of_stages(self.chain.stages, self._keys, slots)
        update: Any = x
        for stage, mine in zip(self.chain.stages[:-1], parts, strict=False):
            update = stage(update, mine, ctx)
        if moving is None:
            self.chain.stages[-1](update, parts[-1], ctx)
        else:
            update = self._apply_some(update, parts[-1], ctx, moving)
        direction = update.direction() if want_update and isinstance(update, Ratio) else update
        if want_update:
            # A copy, since the slot it may be is about to decay.
            direction = direction.clone()
        for stage, mine in zip(self.chain.stages, parts, strict=True):
            for slot in stage.slots:
                if slot.home == "grad_buffer":
                    mine[slot.name].mul_(stage.options["beta"])
        return direction if want_update else None

    def _tokens(self, counts: Any) -> Tensor | None:
        # Of the layer's counts those of this parameter's experts; other parameters have none.
        if not self.is_expert:
            return None
        if counts is None:
            if self.chain.has("token_gate"):
                raise GradreelError(
                    f"{self.info.name}: a token gate needs tokens_per_expert; record the routing, build the optimizer "
                    "by make_optimizer(model, ..), or leave the gate out"
                )
            return None
        tokens = torch.as_tensor(counts).reshape(-1)
        if self.layout.expert_stacked:
            wanted = self.layout.experts
            if tokens.numel() != wanted:
                raise GradreelError(
                    f"{self.info.name}: tokens_per_expert has {tokens.numel()} entries; "
                    f"allowed: {wanted}, one per expert"
                )
            return tokens
        assert self.info.expert is not None
        return tokens if tokens.numel() == 1 else tokens[self.info.expert : self.info.expert + 1]

    def _parts(self, chosen: Tensor | None, x: Tensor) -> Iterator[Part]:
        # Blocks of experts, so that what stages allocate stays small beside the parameter.
        if not self.layout.expert_stacked:
            yield from self._row_blocks(x)
            return
        each = max(1, x[:1].numel())
        size = self.layout.experts if any(map(couples_experts, self.chain)) else max(1, BLOCK // each)
        if chosen is not None:
            yield from chosen.nonzero().flatten().split(size)
        elif size >= self.layout.experts:
            yield None
        else:
            for start in range(0, self.layout.experts, size):
                yield slice(start, min(start + size, self.layout.experts))

    def _row_blocks(self, x: Tensor) -> Iterator[Part]:
        if x.numel() <= BLOCK or not x.dim() or not is_elementwise(self.chain):
            yield None
            return
        # Multiples of 64 rows, so that vectorised loops meet their ends where they would in one piece.
        size = max(64, BLOCK // x[:1].numel() // 64 * 64)
        for start in range(0, x.shape[0], size):
            yield slice(start, min(start + size, x.shape[0]))

    def _random(self, count: int | Tensor, part: Part, x: Tensor) -> Any:
        # Keyed by the steps each expert itself has taken: whether others were idle, or on this rank, changes nothing.
        size = 0 if part is None else x[:1].numel()
        if self.rng is None and isinstance(count, Tensor):
            ids = part.tolist() if isinstance(part, Tensor) else list(range(self.layout.experts))
            ids = ids[part] if isinstance(part, slice) else ids
            each = {expert: CounterRng(self.seed, int(count[expert]), self.info.name) for expert in ids}
            return SlicedRng(each, base=self.first_element, experts=ids, size=x[:1].numel())
        rng = self.rng or CounterRng(self.seed, int(count), self.info.name)
        if isinstance(part, Tensor):
            return SlicedRng(rng, base=self.first_element, experts=part.tolist(), size=size)
        base = self.first_element + (0 if part is None else part.start * size)
        return SlicedRng(rng, base=base) if base else rng

    def _apply_some(self, update: Any, slots: dict[str, Tensor], ctx: Context, moving: Tensor) -> Tensor:
        # Idle policy "decay": every expert's state has moved, only the busy experts' weights may.
        direction = update.direction() if isinstance(update, Ratio) else update
        if not self.layout.expert_stacked:
            return torch.zeros_like(direction)
        ids = moving.nonzero().flatten().to(direction.device)
        part = ctx.weight.index_select(0, ids)
        chosen = direction.index_select(0, ids)
        rng: Any = SlicedRng(ctx.rng, experts=ids.tolist(), size=direction[:1].numel())
        self.chain.stages[-1](chosen, slots, replace(ctx, weight=part, rng=rng))
        ctx.weight.index_copy_(0, ids, part)
        return torch.zeros_like(direction).index_copy_(0, ids, chosen)

    def _choose(self, touched: Tensor | None, busy: Tensor | None) -> Tensor | None:
        # Which experts take part in the step: bool [E], None meaning all.
        return busy if self.idle == "skip" and self.is_expert else touched

    @property
    def is_expert(self) -> bool:
        """Whether the parameter belongs to experts, so that the idle policy concerns it."""
        return self.info.expert_axis is not None or self.info.expert is not None

    def _advance(self, chosen: Tensor | None) -> int | Tensor:
        # Returns the steps taken, this one included: a number, or one per expert [E] where those that step now differ.
        counter = self.state.get(STEP)
        if counter is None:
            return 0
        if counter.dim() == 0:
            counter += 1
            return int(counter)
        counter += 1 if chosen is None else chosen.to(counter.dtype)
        counts = counter if chosen is None else counter[chosen]
        low, high = int(counts.min()), int(counts.max())
        return low if low == high else counter

    def _slot_items(self) -> list[tuple[str, Tensor]]:
        return [(key, self.state[key]) for key in self._keys]

    def _has_expert_axis(self, slot: Slot) -> bool:
        # A slot can be taken apart by experts if its shape grows along axis 0, and only there, as experts do.
        if not self.layout.expert_stacked:
            return False
        shape = self.layout.canonical_shape
        now, more = slot.shape(shape), slot.shape((shape[0] + 1, *shape[1:]))
        apart = len(now) == len(more) > 0 and now[0] == shape[0] and more == (now[0] + 1, *now[1:])
        if not apart and self.idle == "skip":
            raise GradreelError(
                f"{self.info.name}: slot {slot.name} {now} joins experts, so idle experts cannot be skipped; "
                "use the idle policy as_zero or decay"
            )
        return apart

    def _zeros(self, slot: Slot, device: Any) -> Tensor:
        shape, dtype = slot.shape(self.layout.canonical_shape), slot_dtype(slot, self.info)
        if shape != self.layout.canonical_shape:
            return torch.zeros(shape, dtype=dtype, device=device)
        # As torch's zeros_like: the memory order of the parameter, so that elementwise arithmetic takes the same path.
        own = torch.zeros(self.info.shape, dtype=dtype, device=device)
        if self.info.strides is not None and _is_dense(self.info.shape, self.info.strides):
            own = torch.empty_strided(self.info.shape, self.info.strides, dtype=dtype, device=device).zero_()
        return self.layout.canonical(own)

    def _bytes(self, home: str) -> int:
        return sum(self.state[key].nbytes for key, slot in self._slots.items() if slot.home == home)

    def _check(self, weight: Tensor, gradient: Tensor) -> None:
        name, shape = self.info.name, tuple(self.info.shape)
        if gradient.is_sparse or gradient.layout is not torch.strided:
            raise GradreelError(
                f"{name}: the gradient is sparse; allowed: dense gradients (sparse=False in nn.Embedding)"
            )
        if tuple(weight.shape) != shape or tuple(gradient.shape) != shape:
            raise GradreelError(
                f"{name}: weight {tuple(weight.shape)}, gradient {tuple(gradient.shape)}; allowed: {shape}, as declared"
            )


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in sorted(((s, t) for s, t in zip(shape, strides, strict=True) if s != 1), key=lambda st: st[1]):
        if stride != expected:
            return False
        expected *= size
    return True
