"""Every recipe, on every shape, with None, zero and spike gradients; every variant; every stage."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from toolkit.recipes import ONE_D, RECIPES, REST, Recipe, Stepper
from toolkit.stages import STAGES, Context, Slot, Stage
from toolkit.stages._rng import CounterRng
from toolkit.variants import VARIANTS, recipe
from traces.errors import GradreelError
from traces.views import NONZERO, ROLES, ZERO, ParamInfo

INFOS = {
    "0-d": ParamInfo("p", "other", ()),
    "1-d": ParamInfo("p", "norm", (7,)),
    "1-d experts": ParamInfo("p", "routed_expert", (3, 7), expert_axis=0, num_experts=3),
    "2-d": ParamInfo("p", "attention", (6, 5), matrix_axes=(0, 1)),
    "2-d expert": ParamInfo("p", "routed_expert", (6, 5), expert=1, matrix_axes=(0, 1)),
    "2-d embedding": ParamInfo("p", "embedding", (30, 5), matrix_axes=(0, 1)),
    "2-d router": ParamInfo("p", "router", (3, 5), matrix_axes=(0, 1)),
    "router bias": ParamInfo("p", "router_bias", (3,)),
    "3-d experts": ParamInfo("p", "routed_expert", (3, 6, 5), expert_axis=0, num_experts=3, matrix_axes=(1, 2)),
    "3-d turned": ParamInfo("p", "routed_expert", (5, 3, 6), expert_axis=1, num_experts=3, matrix_axes=(2, 0)),
    "3-d without experts": ParamInfo("p", "other", (3, 6, 5), matrix_axes=(0, 1)),
    "4-d": ParamInfo("p", "other", (4, 3, 5, 2), matrix_axes=(0, 1)),
    "4-d without matrices": ParamInfo("p", "other", (4, 3, 5, 2)),
    "4-d experts": ParamInfo("p", "routed_expert", (3, 2, 4, 5), expert_axis=0, num_experts=3, matrix_axes=(2, 3)),
    "1 x 1": ParamInfo("p", "attention", (1, 1), matrix_axes=(0, 1)),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _gradient(info: ParamInfo, step: int, dtype: torch.dtype) -> Tensor | None:
    generator = torch.Generator().manual_seed(step)
    gradient = torch.randn(info.shape, generator=generator).to(dtype)
    match step % 5:
        case 1:
            return None
        case 2:
            return torch.zeros_like(gradient)
        case 3:
            return gradient * 1e4
    return gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RECIPES.names())
def test_recipe_on_every_shape(name: str, dtype: str) -> None:
    built = recipe(name)
    for label, plain in INFOS.items():
        info = dataclasses.replace(plain, dtype=dtype)
        stepper = Stepper(built, info)
        weight = torch.randn(info.shape, generator=torch.Generator().manual_seed(9)).to(DTYPES[dtype])
        for step in range(8):
            gradient, before = _gradient(info, step, DTYPES[dtype]), weight.clone()
            states = {key: slot.clone() for key, slot in stepper.state.items()}
            kept = None if gradient is None else gradient.clone()
            update = stepper.step(weight, gradient, lr=built.lr, want_update=True)
            assert weight.dtype == DTYPES[dtype]
            if gradient is None:
                assert update is None
                assert torch.equal(weight, before), label
                assert all(torch.equal(states[key], slot) for key, slot in stepper.state.items()), label
                continue
            assert torch.equal(gradient, kept), f"{label}: the gradient was changed"
            assert update is not None
            assert update.shape == weight.shape
            assert update.dtype == (torch.float64 if dtype == "float64" else torch.float32)
            assert torch.isfinite(weight).all(), f"{label}, step {step}"
            update.fill_(torch.nan)  # lent to nobody else
        assert all(torch.isfinite(s).all() for s in stepper.state.values()), label


@pytest.mark.parametrize("name", RECIPES.names())
def test_recipe_describes_itself(name: str) -> None:
    family = RECIPES.get(name)
    built = family()
    assert family.name == name == built.name
    assert family.summary
    assert family.paper
    assert family.checked_against
    assert family.rate
    assert set(built.temporaries) == {"original", "ours"}
    assert built.lr > 0
    assert dataclasses.is_dataclass(family.options)
    assert family.options.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert {key.split("/")[0] for key in built.groups} <= {*ROLES, ONE_D, REST}
    for role in ROLES:
        for shape in ((), (4,), (4, 6)):
            built.chain_for(ParamInfo("p", role, shape, matrix_axes=(0, 1) if len(shape) == 2 else None))
    with pytest.raises(GradreelError, match="allowed"):
        family(lr=-1.0)
    with pytest.raises(GradreelError, match="has no option 'nonsense'; allowed: "):
        family(nonsense=1)


@pytest.mark.parametrize("name", RECIPES.names())
@pytest.mark.parametrize("dtype", ["complex64", "int64", "bool"])
def test_what_no_recipe_can_step(name: str, dtype: str) -> None:
    with pytest.raises(GradreelError, match=f"p is {dtype}; allowed: float64, float32, bfloat16, float16"):
        Stepper(recipe(name), ParamInfo("p", "other", (3, 3), dtype, matrix_axes=(0, 1)))


@pytest.mark.parametrize("name", RECIPES.names())
def test_sparse_gradients_are_refused(name: str) -> None:
    stepper = Stepper(recipe(name), ParamInfo("p", "embedding", (3, 3), matrix_axes=(0, 1)))
    with pytest.raises(GradreelError, match="p: the gradient is sparse"):
        stepper.step(torch.zeros(3, 3), torch.eye(3).to_sparse(), lr=0.1)


@pytest.mark.parametrize("name", RECIPES.names())
def test_lr_zero_leaves_the_weight(name: str) -> None:
    for info in INFOS.values():
        stepper, weight = Stepper(recipe(name), info), torch.ones(info.shape)
        for step in (0, 2, 3):
            stepper.step(weight, _gradient(info, step, torch.float32), lr=0.0)
        assert torch.equal(weight, torch.ones(info.shape))


TEMPORARIES = (
    "sgd(momentum=0.9)",
    "sgd(momentum=0.9, nesterov=True, weight_decay=0.1)",
    "skewadam(paper_exact=True)",
    "skewadam(tiers=uniform)",
    "adafactor(scale_parameter=True)",
    "mesh_full_state(experts=adam)",
    "mesh_full_state(experts=sinkhorn_of_adam)",
    "mesh_b(multiplier=before)",
)


@pytest.mark.parametrize("name", [*RECIPES.names(), *TEMPORARIES])
def test_declared_temporaries_are_those_measured(name: str) -> None:
    built, elements, most = recipe(name), 1 << 18, 0
    for role, shape in {"routed_expert": (512, 512), "attention": (512, 512), "embedding": (2048, 128)}.items():
        info = ParamInfo("p", role, shape, expert=0 if role == "routed_expert" else None, matrix_axes=(0, 1))
        stepper, weight = Stepper(built, info), torch.ones(shape)
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            for _ in range(2):
                stepper.step(weight, gradient, lr=1e-3)
        assert seen.profiler is not None
        events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        held = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            held += event.nbytes()
            most = max(most, held)
    assert most / (4 * elements) == pytest.approx(built.temporaries["ours"], abs=0.1)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd(momentum=0.9)", "mesh_full_state(experts=adam)"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elementwise_chains_step_huge_parameters_in_blocks(name: str, dtype: str, monkeypatch: Any) -> None:
    built, info = recipe(name), dataclasses.replace(INFOS["2-d expert"], shape=(200, 5), dtype=dtype)
    results = []
    for block in (1 << 24, 320, 1):
        monkeypatch.setattr("toolkit.recipes._stepper.BLOCK", block)
        stepper = Stepper(built, info)
        parts: list[Any] = []
        split = stepper._row_blocks
        monkeypatch.setattr(stepper, "_row_blocks", lambda x: parts.extend(split(x)) or list(split(x)))  # noqa: B023
        weight = torch.randn(200, 5, generator=torch.Generator().manual_seed(9)).to(DTYPES[dtype])
        updates = [
            stepper.step(weight, g, lr=1e-2, want_update=True)
            for step in range(5)
            if (g := _gradient(info, step, DTYPES[dtype])) is not None
        ]
        results.append((weight, *updates, *stepper.state.values()))
        assert len(parts) == len(updates) * (1 if block > 1000 else 4)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", VARIANTS.names())
def test_variant_changes_a_recipe_or_raises(name: str) -> None:
    variant = VARIANTS.get(name)
    assert variant.summary
    assert variant.usage.startswith(name)
    usages = re.findall(rf"{name}(?:\([^)]*\))?", variant.usage)
    assert len(usages) == len(variant.usage.split(", " + name))
    for usage in usages:
        works = []
        for base in (*RECIPES.names(), "skewadam(paper_exact=True)", "sinkgd(rounding=nearest)"):
            with contextlib.suppress(GradreelError):
                works.append((recipe(base), recipe(f"{base}+{usage}")))
        _check_works(usage, works)


def _check_works(name: str, works: list[tuple[Recipe, Recipe]]) -> None:
    assert works, f"{name} changes no recipe"
    for before, after in works:
        table = {k: (c.describe(), c.lr_scale) for k, c in before.groups.items()}
        assert {k: (c.describe(), c.lr_scale) for k, c in after.groups.items()} != table or before.idle != after.idle
        for info in INFOS.values():
            stepper, weight = Stepper(after, info), torch.ones(info.shape)
            for step in range(4):
                presence = [NONZERO, ZERO, NONZERO] if info.expert_axis is not None else None
                gradient = _gradient(info, step, torch.float32)
                stepper.step(weight, gradient, lr=after.lr, presence=presence, tokens_per_expert=[5, 0, 9])
            assert torch.isfinite(weight).all(), after.name


@pytest.mark.parametrize("name", STAGES.names())
def test_stage_declares_its_slots(name: str) -> None:
    one: Stage = STAGES.get(name)
    assert one.name == name
    assert one.doc
    shape = (3, 6, 4)
    slots = _Watched({slot.name: torch.zeros(slot.shape(shape)) for slot in one.slots})
    weight, x = torch.ones(shape), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    start = x.clone()
    for step in (1, 2):
        tokens = torch.tensor([2, 1, 0])
        ctx = Context(weight, 0.1, step, CounterRng(0, step), expert_stacked=True, tokens_per_expert=tokens)
        one(x, slots, ctx)
    assert slots.used == {slot.name for slot in one.slots}, "slots declared and slots used differ"
    assert torch.equal(x, start), "a stage may write to its own slots only"
    assert torch.equal(weight, torch.ones(shape)) is (name != "apply"), "only apply writes the weight"
    for slot in one.slots:
        assert isinstance(slot, Slot)
        assert slots[slot.name].any(), f"{slot.name} is never written"
    with pytest.raises(GradreelError, match=f"stage {name} has no option 'nonsense'"):
        one.with_options(nonsense=1)


class _Watched(dict[str, Any]):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.used.add(key)
        return super().__getitem__(key)
