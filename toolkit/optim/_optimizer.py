"""`RecipeOptimizer`: a recipe behind torch's optimizer interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.optim import _state
from toolkit.optim._averaging import AveragingCheck
from toolkit.optim._groups import describe, role_groups
from toolkit.optim._hidden import MODES, HiddenMomentum, presence_codes, resolve, several_processes
from toolkit.optim._routing import RoutingCounts
from toolkit.optim._shards import Shard
from toolkit.optim._table import assignment_table
from toolkit.recipes import Recipe, Stepper
from toolkit.recipes._checks import one_of, rate, whole
from toolkit.variants import recipe as named
from traces.errors import GradreelError


class RecipeOptimizer(torch.optim.Optimizer):
    """Any recipe as a drop-in `torch.optim.Optimizer`: closures, schedulers, state_dict, any loop.

    `params`: parameters, (name, parameter) pairs, or groups `{"params": [..], "role": "routed_expert", "lr": ..}`; a
    group may carry `layouts`, as `role_groups` gives them. `recipe`: a name or a Recipe; `options` are its switches.
    `lr` is the base rate; a row's own factor is applied inside. `seed` drives stochastic rounding, whose numbers
    depend on (seed, step, parameter name, element) alone.

    `hidden_momentum` says where the momentum of MESH lives: "attached" is added onto by backward itself (no gradient
    beside it; `.grad` is None between backward and step); "apart" keeps `.grad` an ordinary gradient, for GradScaler,
    clipping by others and several processes; "auto" begins apart and attaches at the end of the first step, unless a
    GradScaler or a process group has shown itself by then.

    A parameter whose gradient is None is left alone. Errors: GradreelError (a ValueError) for values out of range,
    unknown roles and switches, complex or sparse tensors, `capturable` and `foreach`.

    `fused=True` takes the steps that a fused kernel knows with it (`Stepper`): faster, and equal to the chain but for
    roundings, so that a replay of such a run is not comparable bit for bit.
    """

    def __init__(
        self,
        params: Iterable[Any],
        recipe: str | Recipe = "adamw",
        *,
        lr: float | None = None,
        seed: int = 0,
        maximize: bool = False,
        hidden_momentum: str = "auto",
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("capturable", capturable), ("foreach", foreach)):
            if value:
                raise GradreelError(f"{name} is {value}; allowed: False: steps run one parameter at a time, uncaptured")
        one_of("hidden_momentum", hidden_momentum, MODES)
        if isinstance(recipe, str) and lr is not None:
            options["lr"] = lr
        self.recipe = named(recipe, **options)
        base = rate("lr", self.recipe.lr if lr is None else lr)
        whole("seed", seed, low=0)
        self.seed, self.maximize, self.hidden_momentum = seed, bool(maximize), hidden_momentum
        self._steppers: dict[nn.Parameter, Stepper] = {}
        self._infos: dict[nn.Parameter, Any] = {}
        self._shards: dict[nn.Parameter, Shard] = {}
        self._hidden: dict[nn.Parameter, HiddenMomentum] = {}
        self._routing: RoutingCounts | None = None
        self._averaging: AveragingCheck | None = None
        self._told = False  # of attached momentum, once
        self.fused = bool(fused)
        defaults = {"lr": base, "role": "other", "layouts": None}
        # A recorder looks here for what decides the bits of a step.
        super().__init__(params, defaults | {"fused": True} if self.fused else defaults)

    def __repr__(self) -> str:
        """The assignment of parameters to chains, a line per role and chain; print it before training."""
        rated = [(self._infos[p], float(g["lr"])) for g in self.param_groups for p in g["params"] if p in self._infos]
        return assignment_table(self.recipe, rated)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch; besides checks role, layout and dtype of every parameter, before anything is stored."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._register(group)
        except GradreelError:
            for parameter in self.param_groups.pop()["params"]:
                self._forget(parameter)
            raise

    def _forget(self, parameter: nn.Parameter) -> None:
        # A hook left behind would go on taking gradients into a buffer that nobody steps.
        if parameter in self._hidden:
            self._hidden.pop(parameter).close()
        for known in (self._infos, self._shards, self._steppers, self.state):
            known.pop(parameter, None)

    def __getstate__(self) -> dict[str, Any]:
        raise GradreelError(
            f"{type(self).__name__} cannot be copied or pickled, since hooks tie it to its parameters; build another "
            "and give it this one's state_dict()"
        )

    def _register(self, group: dict[str, Any]) -> None:
        rate(f"lr of group {group['role']}", group["lr"])
        layouts = group["layouts"] or [None] * len(group["params"])
        if len(layouts) != len(group["params"]):
            raise GradreelError(f"group {group['role']}: {len(layouts)} layouts for {len(group['params'])} parameters")
        start = sum(len(g["params"]) for g in self.param_groups[:-1])
        names = group.get("param_names") or [f"param_{start + i}" for i in range(len(group["params"]))]
        for parameter, name, layout in zip(group["params"], names, layouts, strict=True):
            info = describe(parameter, name, group["role"], layout)
            if hasattr(parameter, "placements"):
                if len(info.shape) != parameter.ndim:
                    raise GradreelError(
                        f"{name}: experts fused into 2-D weights {tuple(parameter.shape)} are sharded; allowed: whole"
                    )
                self._shards[parameter] = Shard(parameter, info, self.recipe)
                info = self._shards[parameter].info
            self._infos[parameter] = info
            # The stepper checks dtype and layout; on the meta device it costs nothing.
            probe = Stepper(self.recipe, info, device="meta")
            attach = probe.buffer_key is not None and parameter.requires_grad
            if attach and resolve(self.hidden_momentum, probe, maximize=self.maximize, parameter=parameter):
                active = self.hidden_momentum == "attached"
                self._hidden[parameter] = HiddenMomentum(parameter, self._stepper(parameter), active=active)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step asks. Before the first step "auto" can still keep the buffer apart, and the scaler unscales
        # and skips as ever; later it must show itself: scaled gradients were added onto the buffer.
        self._keep_apart()
        if self._routing is not None:
            self._routing.step_may_come()
        return bool(self._hidden)

    def watch(self, model: nn.Module) -> None:
        """Read off `model` what only it can tell; `make_optimizer` does so. See there."""
        steppers = [Stepper(self.recipe, info, device="meta") for info in self._infos.values()]
        if any(stepper.chain.has("token_gate") for stepper in steppers if stepper.is_expert):
            self._routing = RoutingCounts(model)
        if any(stepper.buffer_key is not None for stepper in steppers):
            self._averaging = AveragingCheck(model)
            self._averaging.check()

    def _keep_apart(self) -> None:
        for parameter in [p for p, hidden in self._hidden.items() if not hidden.active]:
            self._hidden.pop(parameter).close()

    def _stepper(self, parameter: nn.Parameter) -> Stepper:
        stepper = self._steppers.get(parameter)
        if stepper is None:
            info, device = self._infos[parameter], parameter.device
            stepper = Stepper(self.recipe, info, device=device, seed=self.seed, fused=self.fused)
            if parameter in self._shards:
                stepper.first_element = self._shards[parameter].first_element
            self._steppers[parameter] = stepper
            if stepper.state:
                self.state[parameter] = stepper.state
        return stepper

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns what `closure` returned, None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._hidden and getattr(self, "found_inf", None) is not None:
            raise GradreelError(
                "a GradScaler is at work while hidden momentum is attached, so scaled gradients were added onto it; "
                "build the optimizer with hidden_momentum='apart'"
            )
        if self._hidden and several_processes():
            self._keep_apart()
        if self._hidden and several_processes():
            raise GradreelError(
                "a process group was set up while hidden momentum is attached, so its history was reduced too; set it "
                "up first, or build the optimizer with hidden_momentum='apart'"
            )
        if self._averaging is not None:
            self._averaging.check()
        counts = {} if self._routing is None else self._routing.take()
        rates = [rate(f"lr of group {group['role']}", group["lr"]) for group in self.param_groups]
        for group, lr in zip(self.param_groups, rates, strict=True):
            for parameter in group["params"]:
                layer = self._infos[parameter].layer
                tokens = None if layer is None else counts.get(layer)
                if tokens is not None and parameter not in self._shards:  # ids of experts without weights end it
                    tokens = tokens[: self._infos[parameter].num_experts]
                self._step_one(parameter, lr, tokens)
        self._tell_of_attachment()
        return loss

    def _tell_of_attachment(self) -> None:
        # Who chose "attached" knows; under "auto" a loop that clips would leave the experts out without a word.
        if self._hidden and self.hidden_momentum == "auto" and not self._told:
            self._told = True
            warnings.warn(
                f"from now on backward adds onto the momentum of {len(self._hidden)} parameters and leaves their .grad "
                "None, so clip_grad_norm_ does not see them; clip with toolkit.optim.clip_fresh_gradients, or build "
                "with hidden_momentum='apart' (one gradient more) or 'attached' (without this warning)",
                stacklevel=4,  # past this method, step and torch's wrapper of it
            )

    @torch.no_grad()
    def _step_one(self, parameter: nn.Parameter, lr: float, tokens: Tensor | None) -> None:
        hidden, given = self._hidden.get(parameter), parameter.grad
        if hidden is not None and hidden.active and given is None:
            if hidden.pending:
                self._stepper(parameter).step(
                    parameter.detach(),
                    hidden.buffer,
                    lr=lr,
                    presence=hidden.codes(),
                    tokens_per_expert=tokens,
                    gradient_in_buffer=True,
                )
            hidden.finish_step()
            return
        if given is None:
            return
        stepper, shard = self._stepper(parameter), self._shards.get(parameter)
        weight, gradient = parameter.detach(), given.detach()
        if shard is not None:
            weight, gradient = shard.whole(weight), shard.whole(gradient)
        if gradient.layout is not torch.strided:
            raise GradreelError(f"{stepper.info.name}: its gradient is {gradient.layout}; allowed: dense gradients")
        if weight.ndim < len(stepper.info.shape):  # experts fused into 2-D weights
            weight, gradient = weight.view(stepper.info.shape), gradient.reshape(stepper.info.shape)
        gradient = gradient.neg() if self.maximize else gradient
        watch = stepper.is_expert and self.recipe.idle != "as_zero"
        presence = presence_codes(gradient, stepper) if watch else None
        if shard is not None and tokens is not None and not shard.gathered:
            tokens = shard.own_experts(tokens)
        stepper.step(weight, gradient, lr=lr, presence=presence, tokens_per_expert=tokens)
        if shard is not None:
            shard.write_back(parameter, weight)
        if hidden is not None:
            parameter.grad = None  # it is in the buffer now
            hidden.resumed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch. A gradient that backward added onto attached momentum cannot be taken out again: an error."""
        lost = [h.name for h in self._hidden.values() if h.pending]
        if lost:
            raise GradreelError(
                f"zero_grad between backward and step would have to remove a gradient from the momentum of {lost[0]}; "
                "call step first, use torch.autograd.grad for probes, or hidden_momentum='apart'"
            )
        if self._routing is not None:
            self._routing.forget()
        super().zero_grad(set_to_none)

    def track_fresh_gradients(self, on: bool = True) -> None:
        """Keep this step's own gradient beside attached momentum from now on (costs one gradient of memory)."""
        for hidden in self._hidden.values():
            hidden.tracking = on

    def fresh_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This step's gradient of `parameter`, never its history; None where there was none.

        Errors: GradreelError where hidden momentum is attached, history is in the buffer and
        `track_fresh_gradients` was not called before the backward pass. The first call begins tracking.
        """
        hidden = self._hidden.get(parameter)
        if hidden is None:
            return parameter.grad
        ordinary = not hidden.active or parameter.grad is not None
        gradient = parameter.grad if ordinary else hidden.fresh_gradient()
        self.track_fresh_gradients()
        return gradient

    def grad_buffer(self, parameter: nn.Parameter) -> Tensor | None:
        """What history and this step's gradient add up to: beta B + g, in the parameter's layout, before the step.

        `.grad` itself where the parameter's momentum is not hidden. The recorder's stream `grad_buffer` is this.
        """
        stepper = self._steppers.get(parameter)
        if stepper is None or stepper.buffer_key is None or parameter in self._shards:
            return parameter.grad
        buffer = stepper.layout.restore(stepper.state[stepper.buffer_key])
        hidden, gradient = self._hidden.get(parameter), parameter.grad
        if (hidden is not None and hidden.active and gradient is None) or gradient is None:
            return buffer
        return buffer + (gradient.neg() if self.maximize else gradient).detach()

    def scale_fresh_gradient(self, parameter: nn.Parameter, gradient: Tensor, factor: Tensor) -> None:
        """Multiply what `fresh_gradient` gave by `factor`, in the momentum too; used by `clip_fresh_gradients`."""
        hidden = self._hidden.get(parameter)
        if hidden is None or parameter.grad is not None:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
        else:
            hidden.scale_fresh(gradient, factor)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state allocated so far, without step counters."""
        return sum(s.state_bytes for s in self._steppers.values())

    @property
    def pinned_gradient_bytes(self) -> int:
        """Bytes of gradient buffers that survive between steps, allocated so far."""
        return sum(s.pinned_gradient_bytes for s in self._steppers.values())

    def state_dict(self) -> dict[str, Any]:
        """torch's format with one entry more, `gradreel`: schema version, recipe, seed."""
        return _state.save(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave, bit for bit: no cast to the parameters' dtype, as torch's own loading does.

        Errors: GradreelError for another recipe, another schema version, other groups, shapes or dtypes; nothing is
        changed then.
        """
        _state.load(self, state_dict)

    def describe_groups(self) -> str:
        """One line per group: role, number of parameters, chain."""
        lines = []
        for group in self.param_groups:
            chains = {self.recipe.chain_for(self._infos[p]).describe() for p in group["params"]}
            lines += [f"{group['role']:<16} {len(group['params']):>5}  {chain}" for chain in sorted(chains)]
        return "\n".join(lines)


class SkewAdam(RecipeOptimizer):
    """SkewAdam (arXiv 2607.19058) over groups with roles; `paper_exact=True` keeps the original's quirks."""

    def __init__(self, params: Iterable[Any], lr: float | None = None, **options: Any) -> None:
        super().__init__(params, "skewadam", lr=lr, **options)


class SinkGD(RecipeOptimizer):
    """Stateless Sinkhorn (arXiv 2502.06742) over groups with roles."""

    def __init__(self, params: Iterable[Any], lr: float | None = None, **options: Any) -> None:
        super().__init__(params, "sinkgd", lr=lr, **options)


class Mesh(RecipeOptimizer):
    """MESH (arXiv 2608.04407) over groups with roles."""

    def __init__(self, params: Iterable[Any], lr: float | None = None, **options: Any) -> None:
        super().__init__(params, "mesh", lr=lr, **options)


def make_optimizer(
    model: nn.Module,
    recipe: str | Recipe,
    lr: float | None = None,
    *,
    roles: dict[str, str] | None = None,
    **options: Any,
) -> RecipeOptimizer:
    """The optimizer for a model: roles found in it choose the chains.

    `recipe`: a name such as "mesh+adam_rest", or a Recipe; `lr`: its base rate (default: the recipe's); `roles`
    overrides the role of named parameters; `options` are switches of the recipe and of `RecipeOptimizer`. Where the
    recipe has a token gate, hooks on the model count the tokens of each expert. Which experts are idle is read off
    this step's own gradient, as a recording does. Errors: GradreelError for a DDP communication hook that does not
    average, under hidden momentum, and for a `model` that is no module.
    """
    if not isinstance(model, nn.Module):
        raise GradreelError(
            f"make_optimizer got {type(model).__name__}; allowed: a torch.nn.Module; for parameters or groups call "
            "RecipeOptimizer"
        )
    optimizer = RecipeOptimizer(role_groups(model, roles), recipe, lr=lr, **options)
    optimizer.watch(model)
    return optimizer
