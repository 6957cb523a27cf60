"""Cases and checks of the ops that step a weight: skewadam_step, mesh_step, adamw_step, sign_step, newton_schulz."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.kernels._bench import Case
from toolkit.kernels._bench_tensors import SHAPES, SMALL_SHAPES, Peers, bytes_of, sinkhorn_batched, tensor
from toolkit.kernels._philox import philox_words

if TYPE_CHECKING:
    from torch import Tensor

LR = 1e-3
DTYPES = ("float32", "bfloat16")


class Noise:
    """What a step needs of a generator, without the floor above: philox of a fixed key."""

    philox_key = (1, 2)
    step = 1

    def bits16(self, shape: tuple[int, ...], device: Any = "cpu", *, offset: int = 0) -> Tensor:
        """int32 in [0, 65536)."""
        return (self._words(shape, device, offset) >> 16).int()

    def uniform(self, shape: tuple[int, ...], device: Any = "cpu", *, offset: int = 0) -> Tensor:
        """float32 in [0, 1)."""
        return (self._words(shape, device, offset) >> 8).float() * 2.0**-24

    def _words(self, shape: tuple[int, ...], device: Any, offset: int) -> Tensor:
        return philox_words(self.philox_key, self.step, offset, math.prod(shape), device).reshape(shape)


def _torch_adamw(weight: Tensor, gradient: Tensor) -> dict[str, Callable[[], Any]]:
    """torch's own AdamW on one parameter per matrix, as long as the installed torch has these forms."""
    import torch

    runners: dict[str, Callable[[], Any]] = {}
    for name, form in (("torch AdamW fused", {"fused": True}), ("torch AdamW foreach", {"foreach": True})):
        parameters = [torch.nn.Parameter(w.clone()) for w in weight.unbind(0)]
        for parameter, g in zip(parameters, gradient.unbind(0), strict=True):
            parameter.grad = g.clone()
        runners[name] = torch.optim.AdamW(parameters, lr=LR, **form).step  # type: ignore[arg-type]
    return runners


def _pairs(op: str, device: str, small: bool) -> Iterator[tuple[tuple[int, ...], str, Tensor, Tensor]]:
    for shape in SMALL_SHAPES if small else SHAPES:
        for dtype in DTYPES:
            yield shape, dtype, tensor(shape, device, 0, dtype), tensor(shape, device, 1, dtype)


def _given(op: str, peers: Peers, weight: Tensor, gradient: Tensor) -> dict[str, Callable[[], Any]]:
    return {"peer": partial(peers[op], weight.clone(), gradient, LR)} if op in peers else {}


def _skewadam_cases(device: str, small: bool, peers: Peers) -> Iterator[Case]:
    from toolkit.kernels.skewadam_step import SkewAdamState, skewadam_step

    op = "skewadam_step"
    for shape, dtype, w, g in _pairs(op, device, small):

        def stepper(backend: str | None, weight: Tensor, g: Tensor = g) -> Callable[[], Any]:
            state = SkewAdamState.zeros(weight, factored=True, momentum=False)
            return partial(skewadam_step, weight, g, state, step=2, lr=LR, rng=Noise(), backend=backend)

        ours = stepper(None, w.clone())
        rivals = {"loop over matrices": stepper("eager", w.clone()), **_torch_adamw(w, g), **_given(op, peers, w, g)}
        moved = 3 * w.numel() * bytes_of(dtype)
        yield Case(op, "factored, no momentum", shape, dtype, ours(), ours, moved, rivals)


def _adamw_cases(device: str, small: bool, peers: Peers) -> Iterator[Case]:
    import torch

    from toolkit.kernels.adamw_step import adamw_step

    op = "adamw_step"
    for shape, dtype, w, g in _pairs(op, device, small):
        m, v = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        ours = partial(adamw_step, w.clone(), g, m, v, step=2, lr=LR, rng=Noise())
        moved = w.numel() * (3 * bytes_of(dtype) + 16)
        yield Case(op, "step", shape, dtype, ours(), ours, moved, {**_torch_adamw(w, g), **_given(op, peers, w, g)})


def _sign_cases(device: str, small: bool, peers: Peers) -> Iterator[Case]:
    from toolkit.kernels.sign_step import sign_step

    op = "sign_step"
    for shape, dtype, w, g in _pairs(op, device, small):
        ours = partial(sign_step, w.clone(), g, lr=LR, rng=Noise())
        other = w.clone()
        rivals: dict[str, Callable[[], Any]] = {
            "torch, sign then add": lambda other=other, g=g: other.add_(g.sign(), alpha=-LR)  # type: ignore[misc]
        }
        moved = 3 * w.numel() * bytes_of(dtype)
        yield Case(op, "step", shape, dtype, ours(), ours, moved, {**rivals, **_given(op, peers, w, g)})


def _plain_mesh(weight: Tensor, buffer: Tensor, gradient: Tensor) -> None:
    buffer.add_(gradient)
    sinkhorn_batched(weight, buffer, LR)
    buffer.mul_(0.9)


def _mesh_cases(device: str, small: bool, peers: Peers) -> Iterator[Case]:
    import torch

    from toolkit.kernels.mesh_step import mesh_step

    op = "mesh_step"
    for shape, dtype, w, g in _pairs(op, device, small):
        buffer = torch.zeros(shape, device=device)
        ours = partial(mesh_step, w.clone(), buffer, g, lr=LR, rng=Noise())
        rivals: dict[str, Callable[[], Any]] = {}
        if dtype == "float32":
            rivals["batched formula"] = partial(_plain_mesh, w.clone(), buffer.clone(), g)
        moved = w.numel() * (3 * bytes_of(dtype) + 8)
        yield Case(op, "step", shape, dtype, ours(), ours, moved, {**rivals, **_given(op, peers, w, g)})


def _plain_muon(x: Tensor) -> Tensor:
    import torch

    return torch.stack([_one_muon(matrix) for matrix in x.unbind(0)])


def _one_muon(x: Tensor) -> Tensor:
    turned = x.mT if x.shape[0] > x.shape[1] else x
    y = turned / (turned.norm() + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y.mT if x.shape[0] > x.shape[1] else y


def _newton_schulz_cases(device: str, small: bool, peers: Peers) -> Iterator[Case]:
    from toolkit.kernels.newton_schulz import newton_schulz

    for shape in SMALL_SHAPES if small else SHAPES[:2]:
        x = tensor(shape, device, 1)
        rivals: dict[str, Callable[[], Any]] = {"loop over matrices": partial(_plain_muon, x)}
        if "newton_schulz" in peers:
            rivals["peer"] = partial(peers["newton_schulz"], x)
        ours = partial(newton_schulz, x)
        yield Case("newton_schulz", "5 steps", shape, "float32", "eager", ours, 8 * x.numel(), rivals)


Step = Callable[[str, "Tensor", "Tensor"], None]


def _check_step(op: str, built: tuple[str, ...], step: Step, device: str) -> Iterator[str]:
    """Compare with the reference: float32 to 2e-6; bfloat16 to one unit in the last place in at most 1% of elements."""
    import torch

    from toolkit.kernels._dispatch import refusal

    for dtype in DTYPES:
        start, g = tensor((3, 70, 45), device, 0, dtype), tensor((3, 70, 45), device, 1, dtype)
        g[1, 4], g[1, :, 7] = 0, 0
        truth = start.clone().cpu()
        step("reference", truth, g.cpu())
        for backend in built:
            if backend == "reference" or refusal(op, backend, g, built) is not None:
                continue
            weight = start.clone()
            step(backend, weight, g)
            mine = weight.cpu()
            if dtype == "float32" and not torch.allclose(mine, truth, rtol=2e-6, atol=1e-6):
                yield f"{backend} float32: off by {float((mine - truth).abs().max()):.3g}"
            if dtype == "bfloat16":
                apart = (mine.view(torch.int16).int() - truth.view(torch.int16).int()).abs()
                if int(apart.max()) > 1 or float((apart > 0).float().mean()) > 0.01:
                    yield f"{backend} bfloat16: {int((apart > 0).sum())} of {apart.numel()} elements differ"


def _check_skewadam(device: str) -> Iterator[str]:
    from toolkit.kernels.skewadam_step import BUILT, SkewAdamRule, SkewAdamState, skewadam_step

    for rule in (SkewAdamRule(weight_decay=0.1), SkewAdamRule.paper(weight_decay=0.1)):
        for factored in (True, False):
            for momentum in (True, False):

                def step(
                    backend: str,
                    w: Tensor,
                    g: Tensor,
                    rule: SkewAdamRule = rule,
                    factored: bool = factored,
                    momentum: bool = momentum,
                ) -> None:
                    state = SkewAdamState.zeros(w, factored=factored, momentum=momentum)
                    skewadam_step(w, g, state, step=1, lr=0.01, rule=rule, rng=Noise(), backend=backend)

                for line in _check_step("skewadam_step", BUILT, step, device):
                    yield f"{line} (factored {factored}, momentum {momentum}, {rule.eps_mode})"


def _check_adamw(device: str) -> Iterator[str]:
    import torch

    from toolkit.kernels.adamw_step import BUILT, adamw_step

    def step(backend: str, w: Tensor, g: Tensor) -> None:
        m, v = torch.zeros(w.shape, device=w.device), torch.zeros(w.shape, device=w.device)
        adamw_step(w, g, m, v, step=1, lr=0.01, weight_decay=0.1, rng=Noise(), backend=backend)

    yield from _check_step("adamw_step", BUILT, step, device)


def _check_sign(device: str) -> Iterator[str]:
    from toolkit.kernels.sign_step import BUILT, sign_step

    def step(backend: str, w: Tensor, g: Tensor) -> None:
        sign_step(w, g, lr=0.01, weight_decay=0.1, rng=Noise(), backend=backend)

    yield from _check_step("sign_step", BUILT, step, device)


def _check_mesh(device: str) -> Iterator[str]:
    import torch

    from toolkit.kernels.mesh_step import BUILT, mesh_step

    for blocks in (None, 70):

        def step(backend: str, w: Tensor, g: Tensor, blocks: int | None = blocks) -> None:
            moment = None if blocks is None else torch.zeros(3, blocks, device=w.device)
            mesh_step(
                w, torch.zeros(w.shape, device=w.device), g, lr=0.01, block_moment=moment, rng=Noise(), backend=backend
            )

        yield from _check_step("mesh_step", BUILT, step, device)


def _check_newton_schulz(device: str) -> Iterator[str]:
    import torch

    from toolkit.kernels.newton_schulz import newton_schulz

    for shape in ((3, 24, 50), (3, 50, 24)):
        x = tensor(shape, device, 1)
        truth = newton_schulz(x.cpu(), backend="reference")
        mine = newton_schulz(x, backend="eager").cpu()
        if not torch.allclose(mine, truth, rtol=1e-3, atol=1e-4):
            yield f"eager: off by {float((mine - truth).abs().max()):.3g} on {shape}"


STEP_CASES: dict[str, Callable[[str, bool, Peers], Iterator[Case]]] = {
    "skewadam_step": _skewadam_cases,
    "mesh_step": _mesh_cases,
    "adamw_step": _adamw_cases,
    "sign_step": _sign_cases,
    "newton_schulz": _newton_schulz_cases,
}
STEP_CHECKS: dict[str, Callable[[str], Iterator[str]]] = {
    "skewadam_step": _check_skewadam,
    "mesh_step": _check_mesh,
    "adamw_step": _check_adamw,
    "sign_step": _check_sign,
    "newton_schulz": _check_newton_schulz,
}
