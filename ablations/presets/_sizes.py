"""The sizes that experiments share, so that each states only what it changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ablations.models.config import MoEConfig
from ablations.models.huggingface import HuggingFace
from ablations.presets._ablation import Data, Size

#: 32 experts of which a token sees one: with 64 tokens a step about 2 per expert, where matrices are 64 wide, so that
#: gradients have low rank and many experts are idle. 0.45M parameters, of which 0.4M are in routed experts. The weight
#: of a token's one expert is not renormalised, or no gradient would reach the router but that of its own losses.
FEW_TOKENS = MoEConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    max_positions=128,
    dense_hidden=128,
    expert_hidden=64,
    num_experts=32,
    top_k=1,
    moe_layers=(0,),
    router_weights="softmax_topk",
    aux_coefficient=0.01,
    expert_compute="grouped",
)
#: Changes of it: 8 experts of which a token sees two, and 512 tokens a step: 128 per expert, enough for full rank.
MANY_TOKENS = {"model.num_experts": 8, "model.top_k": 2, "batch": 32, "steps": 400, "warmup": 20}
_NANOWHALE = Path(__file__).resolve().parents[1] / "models" / "known" / "nanowhale-110m.json"
_FINEWEB = Data("huggingface", {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT", "column": "text"})
_OPENWEBTEXT = Data("huggingface", {"path": "Skylion007/openwebtext", "column": "text"})


def few_tokens(**changes: Any) -> Size:
    """Size `cpu`: 1200 steps of 64 bytes in windows of 16, seconds a run.

    With fewer steps the experts hardly matter yet: a token's weight on its expert begins at 1/32.
    """
    size = Size(
        model=FEW_TOKENS,
        steps=1200,
        batch=4,
        length=16,
        warmup=60,
        grid=(5e-4, 1e-3, 2e-3),
        shared_lr=1e-3,
        rest_lr=2e-3,
        eval_batches=64,
        eval_batch=32,
    )
    return replace(size, **changes)


def nanowhale(*, vocab_size: int = 256) -> HuggingFace:
    """The MESH study's model, by default over bytes."""
    config = json.loads(_NANOWHALE.read_text(encoding="utf-8"))["config"]
    config = {key: value for key, value in config.items() if key not in ("model_type", "dtype")}
    return HuggingFace("DeepseekV4ForCausalLM", {**config, "vocab_size": vocab_size})


def on_gpu(**changes: Any) -> Size:
    """Size `gpu`: nanowhale over the offline corpus in bytes, 2000 steps of 16,384 tokens, hours for all runs."""
    size = Size(
        model=nanowhale(),
        steps=2000,
        batch=32,
        length=512,
        warmup=60,
        grid=(2e-4, 6e-4, 2e-3),
        shared_lr=6e-4,
        rest_lr=6e-4,
        eval_batches=32,
        eval_batch=32,
        device="cuda",
    )
    return replace(size, **changes)


def as_mesh(**changes: Any) -> Size:
    """Size `paper` of the MESH study (arXiv 2608.04407): nanowhale, FineWeb-Edu, 5000 steps of 65,536 tokens."""
    size = Size(
        model=nanowhale(vocab_size=129_280),
        data=_FINEWEB,
        steps=5000,
        batch=32,
        length=2048,
        warmup=150,
        grid=(2e-4, 6e-4, 2e-3),
        shared_lr=6e-4,
        rest_lr=6e-4,
        eval_batches=64,
        eval_batch=16,
        device="cuda",
    )
    return replace(size, **changes)


def as_skewadam(**changes: Any) -> Size:
    """Size `paper` of the SkewAdam study (arXiv 2607.19058): 6.78B parameters, OpenWebText, 81.9M tokens."""
    size = Size(
        model=MoEConfig.skewadam_study(),
        data=_OPENWEBTEXT,
        steps=10_000,
        batch=8,
        length=128,
        accumulation=8,
        warmup=300,
        grid=(1e-4, 3e-4, 1e-3),
        shared_lr=3e-4,
        rest_lr=3e-4,
        eval_batches=64,
        eval_batch=16,
        device="cuda",
    )
    return replace(size, **changes)
