"""Tiny random Hugging Face models, in every implementation of their experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder
from traces.roles import classify_roles

transformers = pytest.importorskip("transformers", reason="the `hf` extra is not installed")

COMMON = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 8, "head_dim": 8, "mlp_only_layers": [0]}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
}
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


@pytest.fixture(scope="module")
def build() -> Callable[[str, str], Any]:
    def make(family: str, implementation: str) -> Any:
        prefix, own = FAMILIES[family]
        config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **own})
        config._experts_implementation = implementation
        torch.manual_seed(0)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        with torch.no_grad():  # some families start with a router of zeros, whose choice is all ties
            for name, parameter in model.named_parameters():
                if "gate.weight" in name:
                    parameter.normal_()
        return model.train()

    return make


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(tmp_path: Path, build: Any, notes: list[str], family: str, implementation: str) -> None:
    """Counts equal those of the model's own router logits; gradients equal `p.grad`, bit for bit."""
    model = build(family, implementation)
    moe_layers = [1] if family == "qwen3_moe" else [0, 1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 32, (3, 2, 8), generator=generator)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    expected, gradients = [], []
    at = RecordAt(streams=("gradient", "routing", "scalars", "logits"))
    with Recorder(tmp_path / "a", model, optimizer, at=at, notify=notes.append) as reel:
        for batch in ids:
            out = model(input_ids=batch, attention_mask=mask, labels=batch, output_router_logits=True)
            out.loss.backward()
            top = [logits.softmax(-1).topk(2, dim=-1).indices for logits in out.router_logits]
            real = mask.reshape(-1).bool()
            expected.append(
                [
                    np.bincount(t[real].reshape(-1).numpy(), minlength=logits.shape[-1])
                    for t, logits in zip(top, out.router_logits, strict=True)
                ]
            )
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
            reel.log(loss=out.loss.detach())
            with torch.no_grad():
                model.eval().generate(batch[:1, :4], max_new_tokens=2, do_sample=False)
                model.train()
    trace = open_trace(tmp_path / "a")
    assert [layer.layer for layer in trace.layers] == moe_layers
    for place, layer in enumerate(moe_layers):
        for routing, counts in zip(trace.routing_steps(layer), expected, strict=True):
            assert routing.tokens_per_expert.tolist() == counts[place].tolist()
            assert routing.is_pad.sum() == 3
    roles = classify_roles(model)
    recorded = [name for name, role in roles.items() if role in ("router", "routed_expert")]
    assert len(recorded) == 3 * len(moe_layers)
    for step, grads in enumerate(gradients, start=1):
        for name in recorded:
            assert torch.equal(trace.gradient(name, step), grads[name])
    assert trace.scalars()["tokens"].to_list()[:3] == [13] * 3


def test_checkpointing_in_a_family(tmp_path: Path, build: Any, notes: list[str]) -> None:
    frames = []
    for mode in (None, True, False):
        model = build("olmoe", "eager")
        if mode is not None:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": mode})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.arange(3, 19).reshape(2, 8)
        with Recorder(tmp_path / str(mode), model, optimizer, notify=notes.append):
            for _ in range(2):
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        frames.append(open_trace(tmp_path / str(mode)).routing().collect())
    assert frames[0].equals(frames[1])
    assert frames[0].equals(frames[2])


def test_bfloat16_ids_are_those_executed(tmp_path: Path, build: Any, notes: list[str]) -> None:
    """Fault 12: under autocast the executed ids are recorded, not a choice rebuilt in another precision."""
    model = build("mixtral", "eager")
    executed: list[torch.Tensor] = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(
        lambda m, args: executed.append(args[1].clone()) or None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.arange(3, 19).reshape(2, 8)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
    routing = next(iter(open_trace(tmp_path / "a").routing_steps(0)))
    assert routing.topk_expert_ids.tolist() == executed[0].tolist()
