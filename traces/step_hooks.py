"""Where an optimizer shows its gradients: the pre-hook of its step, or the end of its closure.

The hook sits on each optimizer itself, so that it runs after every process-wide hook and sees what the update sees. A
process-wide hook only finds optimizers that nobody handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from traces.errors import GradreelError


class StepHooks:
    """Watch the optimizers that hold any of `parameters` (those to record, by name).

    `on_gradients(optimizer)` is called when the gradients of a step are complete and nothing is updated yet;
    `in_closure(True)` and `in_closure(False)` bracket what a closure computes after that. An optimizer that steps
    parameters of a watched one takes its place, which `on_switch(old, new)` is told with both class names.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Any,
        on_gradients: Callable[[torch.optim.Optimizer], None],
        in_closure: Callable[[bool], None],
        on_switch: Callable[[str, str], None] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._on_gradients, self._in_closure, self._on_switch = on_gradients, in_closure, on_switch
        self.given, self._announced = optimizer is not None, False
        self.optimizers: list[torch.optim.Optimizer] = []  # kept alive, so that an id is never used again
        self._handles: list[tuple[torch.optim.Optimizer | None, Any]] = []
        self._retired: list[torch.optim.Optimizer] = []  # kept alive for the same reason
        self._inside: set[int] = set()
        if self.given:
            self.optimizers = _as_optimizers(optimizer)
            held = {name for one in self.optimizers for name in self.parameters_of(one)}
            if not held:
                raise GradreelError(
                    "the optimizer holds none of the parameters to record "
                    f"({', '.join(list(self.parameters)[:3])}, ...); give the one that trains them, or none"
                )

    def only(self, announced: Any) -> None:
        """Watch no optimizer of torch: steps are announced, and `announced` stands in for what takes them."""
        self.given, self.optimizers, self._announced = True, [announced], True

    def install(self) -> None:
        """Add the hooks."""
        if self._announced:
            return
        self._handles.append((None, register_optimizer_step_pre_hook(self._find)))
        for optimizer in self.optimizers:
            self._attach(optimizer)

    def remove(self) -> None:
        """Take them away; not from inside one of them."""
        for _, handle in self._handles:
            handle.remove()
        self._handles = []

    def forget_unfinished(self) -> None:
        """A new forward began: a step that raised an exception is over too."""
        self._inside.clear()

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
        """The recorded parameters that `optimizer` holds now."""
        return {self._names[id(p)]: p for g in optimizer.param_groups for p in g["params"] if id(p) in self._names}

    def complete(self, seen: Iterable[torch.optim.Optimizer]) -> bool:
        """Whether a step in which the optimizers `seen` took part needs no other optimizer."""
        seen = list(seen)
        if self.given:
            return all(any(one is other for other in seen) for one in self.optimizers)
        return sum(len(self.parameters_of(one)) for one in seen) >= len(self.parameters)

    def _find(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside or any(optimizer is known for known in self.optimizers):
            return  # what steps inside a watched optimizer's step is a part of it
        mine = set(self.parameters_of(optimizer))
        old = [known for known in self.optimizers if mine & set(self.parameters_of(known))]
        if not mine or (self.given and not old):
            return
        for known in old:
            self._retire(known)
        self.optimizers.append(optimizer)
        self._attach(optimizer)  # torch runs an optimizer's own hooks after the process-wide ones: in this step too
        if old and self._on_switch is not None:
            self._on_switch(", ".join(type(known).__name__ for known in old), type(optimizer).__name__)

    def _retire(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers = [one for one in self.optimizers if one is not optimizer]
        self._retired.append(optimizer)
        for owner, handle in self._handles:
            if owner is optimizer:
                handle.remove()
        self._handles = [pair for pair in self._handles if pair[0] is not optimizer]

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        track = getattr(optimizer, "track_fresh_gradients", None)
        if callable(track):
            track()  # momentum hidden in `.grad` keeps the step's own gradient only on request
        self._handles.append((optimizer, optimizer.register_step_pre_hook(self._before)))
        self._handles.append((optimizer, optimizer.register_step_post_hook(self._after)))

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if id(optimizer) in self._inside:
            return None  # a subclass calls super().step(), and torch has put the hooks around both
        self._inside.add(id(optimizer))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._on_gradients(optimizer)
            return None
        wrapped = self._wrap(optimizer, closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _wrap(self, optimizer: torch.optim.Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            loss = closure(*args, **kwargs)
            calls += 1
            if calls == 1:  # L-BFGS evaluates again and again; the step's gradient is the first
                self._on_gradients(optimizer)
                self._in_closure(True)
            return loss

        return wrapped

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._inside.discard(id(optimizer))
        self._in_closure(False)


def _as_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    found = []
    for one in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        inner = getattr(one, "optimizer", None)
        while isinstance(inner, torch.optim.Optimizer):  # Accelerate's wrapper is an Optimizer around the real one
            one, inner = inner, getattr(inner, "optimizer", None)
        if not isinstance(one, torch.optim.Optimizer):
            raise GradreelError(
                f"optimizer is a {type(one).__name__}, not a torch.optim.Optimizer; give the one whose step() is "
                "called, or None to watch every optimizer of the process"
            )
        found.append(one)
    return found
