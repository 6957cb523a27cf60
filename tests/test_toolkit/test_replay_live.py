"""Record a live model with the real recorder, and let the replay check itself against it."""

from __future__ import annotations

import pytest
import torch

from ablations.models import MoEConfig, MoELanguageModel
from toolkit.optim import make_optimizer
from toolkit.replay import replay, selfcheck
from traces.record_at import RecordAt
from traces.recorder import Recorder

ROLES = ("router", "routed_expert", "attention", "norm", "embedding", "dense_ffn")


def adamw(**options):
    return lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, **options)


def recipe(name, **options):
    return lambda model: make_optimizer(model, name, lr=1e-3, **options)


def tiny_model(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "max_positions": 32}
    experts = {"dense_hidden": 24, "expert_hidden": 12, "num_experts": 4, "top_k": 2, "moe_layers": (1,)}
    return MoELanguageModel(MoEConfig(vocab_size=32, **sizes, **experts, **changes))


def record(path, make, *, steps=8, at=None, warm=0, clip=1.0, dtype=torch.float32):
    """Train and record with warm-up and clipping; `warm` steps are taken before the recording begins."""
    model = tiny_model().to(dtype)
    optimizer = make(model)
    base = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(1)

    def step(number):
        tokens = torch.randint(0, 32, (4, 17), generator=generator)
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens[:, :-1], labels=tokens[:, 1:]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * min(1.0, (number + 1) / 4)
        optimizer.step()

    for number in range(warm):
        step(number)
    with Recorder(path, model, optimizer, at=at or RecordAt(roles=ROLES)):
        for number in range(warm, warm + steps):
            step(number)
    return path


@pytest.mark.parametrize(
    "make",
    [
        adamw(foreach=False),
        adamw(foreach=True),
        recipe("adamw"),
        recipe("skewadam"),
        recipe("skewadam", paper_exact=True),
    ],
    ids=["single", "foreach", "our-adamw", "skewadam", "skewadam-exact"],
)
def test_selfcheck_of_a_live_recording_is_bit_exact(tmp_path, make):
    check = selfcheck(record(tmp_path / "live.trace", make))
    assert check.ok, check.message
    assert check.comparable
    assert check.compared > 10


@pytest.mark.parametrize("make", [adamw(foreach=True), recipe("skewadam")], ids=["adamw", "skewadam"])
def test_selfcheck_of_a_recording_that_began_later(tmp_path, make):
    """The state that was there already is part of the recording."""
    check = selfcheck(record(tmp_path / "late.trace", make, warm=3))
    assert check.ok, check.message
    assert check.comparable


@pytest.mark.parametrize("name", ["skewadam", "skewadam(paper_exact=True)", "sinkgd"])
def test_stochastic_rounding_of_bfloat16_is_replayed_with_its_seed(tmp_path, name):
    path = record(tmp_path / "bf16.trace", recipe(name, seed=11), dtype=torch.bfloat16)
    check = selfcheck(path)
    assert check.ok, check.message
    assert check.comparable
    assert not selfcheck(path, seed=12).ok


def test_a_run_with_two_optimizers_is_checked_group_by_group(tmp_path):
    model = tiny_model()
    experts = [p for n, p in model.named_parameters() if "experts" in n]
    rest = [p for n, p in model.named_parameters() if "experts" not in n]
    optimizers = [torch.optim.SGD(experts, lr=1e-2, momentum=0.9), torch.optim.AdamW(rest, lr=1e-3)]
    with Recorder(tmp_path / "two.trace", model, optimizers, at=RecordAt(roles=ROLES)):
        for number in range(4):
            tokens = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(number))
            model(input_ids=tokens[:, :-1], labels=tokens[:, 1:]).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    check = selfcheck(tmp_path / "two.trace")
    assert check.ok, check.message
    assert "sgd" in check.message
    assert "adamw" in check.message


def test_fused_is_not_comparable_bit_for_bit(tmp_path):
    check = selfcheck(record(tmp_path / "fused.trace", adamw(fused=True)))
    assert not check.comparable
    assert check.ok or "fused=True" in check.message
    assert check.max_difference < 1e-5


def test_replay_of_a_live_recording(tmp_path):
    path = record(tmp_path / "live.trace", adamw())
    result = replay(path, ["adamw", "skewadam", "sinkgd", "mesh"], out=tmp_path / "frame.parquet")
    names = set(result.frame["metric"])
    assert {"update_rms", "expert_load", "grad_cos", "path_length", "state_bytes"} <= names
    assert result.selfcheck().ok
    assert set(result.frame["role"].drop_nulls()) >= {"router", "routed_expert"}
