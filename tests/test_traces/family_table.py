"""The model families that are tested, each as a tiny random model with a rule of its own for what it executes.

Legend: E experts, K top-k, T tokens, H hidden size, I expert width. The README's table is made of this one:
`python tests/test_traces/family_table.py` prints it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from traces.families import family_of
from traces.layouts import find_moe_layers
from traces.roles import describe_params

VOCAB = 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
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
LATENT = {  # compressed attention, as DeepSeek's
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
ALL = ("eager", "grouped_mm", "batched_mm")


def top_k_of_logits(logits: Tensor, router: nn.Module, tokens: Tensor) -> Tensor:
    """The K largest logits; softmax, sigmoid and what comes after keep the order."""
    return logits.topk(2, dim=-1).indices


def top_1_of_logits(logits: Tensor, router: nn.Module, tokens: Tensor) -> Tensor:
    return logits.argmax(-1, keepdim=True)


def biased_in_groups(logits: Tensor, router: nn.Module, tokens: Tensor) -> Tensor:
    """DeepSeek-V3: the bias counts in the choice; only experts of the best group (of two) are eligible."""
    scores = logits.float().sigmoid() + router.e_score_correction_bias
    groups = scores.view(len(scores), 2, -1)
    best = groups.topk(2, dim=-1).values.sum(-1).argmax(-1)
    keep = torch.arange(2)[None] == best[:, None]
    return scores.masked_fill(~keep.repeat_interleave(groups.shape[-1], 1), float("-inf")).topk(2, dim=-1).indices


def biased(logits: Tensor, router: nn.Module, tokens: Tensor) -> Tensor:
    return (logits.float().sigmoid() + router.e_score_correction_bias).topk(2, dim=-1).indices


def root_softplus_or_hash(logits: Tensor, router: nn.Module, tokens: Tensor) -> Tensor:
    """DeepSeek-V4: hash layers look the experts up by token id; the others add a bias to the scores."""
    if hasattr(router, "tid2eid"):
        return router.tid2eid[tokens.reshape(-1)]
    scores = nn.functional.softplus(logits.float()).sqrt() + router.e_score_correction_bias
    return scores.topk(2, dim=-1).indices


def biased_softmax(logits: Tensor, router: nn.Module, tokens: Tensor) -> Tensor:
    return (logits.float().softmax(-1) + router.e_score_correction_bias).topk(2, dim=-1).indices


def first_come(logits: Tensor, router: nn.Module, tokens: Tensor) -> Tensor:
    """Switch: the best expert, unless as many tokens of the sequence as its capacity came before. -1: dropped."""
    ids = []
    for sequence in logits:
        room = [router.expert_capacity] * logits.shape[-1]
        for best in sequence.argmax(-1).tolist():
            room[best] -= 1
            ids.append(best if room[best] >= 0 else -1)
    return torch.tensor(ids)[:, None]


@dataclass(frozen=True)
class Row:
    """One family. `roles` counts its parameters by role, `experts` gives (rows, columns) of one expert's matrices.

    `logits_of` ends the names of the modules whose output is, or begins with, the router's logits.
    """

    name: str
    model: str
    router: str
    roles: dict[str, int]
    experts: dict[str, tuple[int, int]]
    config: dict[str, Any] = field(default_factory=dict)
    config_class: str | None = None
    top_k: int = 2
    num_experts: int = 4
    layers: tuple[int, ...] = (0, 1)
    logits_of: str = "mlp.gate"
    executed: Callable[[Tensor, nn.Module, Tensor], Tensor] = top_k_of_logits
    implementations: tuple[str | None, ...] = ALL
    own_logits: bool = True  # the model's output holds router_logits of every MoE layer

    def build(self, implementation: str | None = None) -> Any:
        """A tiny random model in training mode, the same at every call."""
        if self.model == "MoELanguageModel":
            return _own_model(self.config)
        import transformers

        prefix = self.model.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
        config = getattr(transformers, self.config_class or f"{prefix}Config")(**{**COMMON, **self.config})
        if implementation is not None:
            config._experts_implementation = implementation
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:  # some start at zero, and routers of zeros choose by ties
                    parameter.normal_(0, 1.0 if f"{self.logits_of}." in name else 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.uniform_(-0.3, 0.3)
                elif name.endswith("tid2eid"):
                    buffer.copy_(torch.stack([torch.randperm(self.num_experts)[:2] for _ in range(VOCAB)]))
        return model.train()


def _own_model(config: dict[str, Any]) -> Any:
    from ablations.models import MoEConfig, MoELanguageModel

    torch.manual_seed(0)
    return MoELanguageModel(MoEConfig(**config)).train()


STACKED = {"gate_up_proj": (48, 16), "down_proj": (16, 24)}
NARROW = {"gate_up_proj": (16, 16), "down_proj": (16, 8)}
V4 = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "head_dim": 8,
    "q_lora_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 4,
    "index_n_heads": 2,
    "index_head_dim": 4,
    "index_topk": 4,
    "hc_mult": 2,
    "layer_types": ["sliding_attention"] * 2,
    "partial_rotary_factor": 0.5,
}
V4_ROLES = {
    "embedding": 1,
    "attention": 12,
    "norm": 9,
    "router": 2,
    "routed_expert": 4,
    "shared_expert": 6,
    "hyper_connection": 15,
    "head": 1,
}

ROWS = [
    Row(
        "mixtral", "MixtralForCausalLM", "softmax, top K",
        {"embedding": 1, "attention": 8, "router": 2, "routed_expert": 4, "norm": 5, "head": 1},
        STACKED, {"num_local_experts": 4},
    ),
    Row(
        "qwen2_moe", "Qwen2MoeForCausalLM", "softmax, top K",
        {"embedding": 1, "attention": 14, "router": 2, "routed_expert": 4, "shared_expert": 8, "norm": 5, "head": 1},
        NARROW, {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    ),
    Row(
        "qwen3_moe", "Qwen3MoeForCausalLM", "softmax, top K",
        {"embedding": 1, "attention": 8, "norm": 9, "dense_ffn": 3, "routed_expert": 2, "router": 1, "head": 1},
        NARROW, {"num_experts": 6, "moe_intermediate_size": 8, "head_dim": 8, "mlp_only_layers": [0]},
        num_experts=6, layers=(1,),
    ),
    Row(
        "olmoe", "OlmoeForCausalLM", "softmax, top K",
        {"embedding": 1, "attention": 8, "norm": 9, "router": 2, "routed_expert": 4, "head": 1},
        STACKED, {"num_experts": 4},
    ),
    Row(
        "deepseek_v3", "DeepseekV3ForCausalLM", "sigmoid, bias, top groups, top K",
        {
            "embedding": 1, "attention": 10, "norm": 9, "dense_ffn": 3, "routed_expert": 2, "router": 1,
            "shared_expert": 3, "head": 1,
        },
        NARROW,
        {
            **LATENT, "moe_intermediate_size": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        num_experts=8, layers=(1,), executed=biased_in_groups,
    ),
    Row(
        "deepseek_v4", "DeepseekV4ForCausalLM", "root of softplus, bias, top K",
        V4_ROLES, STACKED, {**V4, "mlp_layer_types": ["moe"] * 2}, executed=root_softplus_or_hash,
    ),
    Row(
        "deepseek_v4, hash layers", "DeepseekV4ForCausalLM", "a table by token id",
        V4_ROLES, STACKED, {**V4, "mlp_layer_types": ["hash_moe", "moe"]},
        executed=root_softplus_or_hash, own_logits=False,
    ),
    Row(
        "gpt_oss", "GptOssForCausalLM", "top K, softmax",
        {"embedding": 1, "attention": 18, "router": 4, "routed_expert": 8, "norm": 5, "head": 1},
        STACKED,
        {"num_local_experts": 4, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        logits_of="mlp.router",
    ),
    Row(
        "granitemoe", "GraniteMoeForCausalLM", "top K, softmax",
        {"embedding": 1, "attention": 8, "norm": 5, "router": 2, "routed_expert": 4, "head": 1},
        STACKED, {"num_local_experts": 4}, logits_of="block_sparse_moe.router",
    ),
    Row(
        "phimoe", "PhimoeForCausalLM", "sparse mixer, 2 of E",
        {"embedding": 1, "attention": 8, "router": 2, "routed_expert": 4, "norm": 10, "head": 1},
        STACKED, {"num_local_experts": 4, "router_jitter_noise": 0.0}, logits_of="mlp.router",
    ),
    Row(
        "jamba", "JambaForCausalLM", "softmax, top K",
        {"embedding": 1, "attention": 13, "norm": 8, "dense_ffn": 3, "router": 1, "routed_expert": 2, "head": 1},
        STACKED,
        {
            "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 2,
        },
        layers=(1,), logits_of="feed_forward.router",
    ),
    Row(
        "llama4", "Llama4ForCausalLM", "top K, sigmoid; every expert runs",
        {"embedding": 1, "attention": 8, "routed_expert": 4, "router": 2, "shared_expert": 6, "norm": 5, "head": 1},
        STACKED, {"num_local_experts": 4, "intermediate_size_mlp": 24, "head_dim": 8},
        config_class="Llama4TextConfig", logits_of="feed_forward.router", implementations=(None,),
    ),
    Row(
        "switch_transformers", "SwitchTransformersForConditionalGeneration", "softmax, top 1, capacity",
        {"embedding": 1, "attention": 26, "norm": 12, "dense_ffn": 4, "router": 2, "routed_expert": 12},
        {"wi": (24, 16), "wo": (16, 24)},
        {
            "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_heads": 2, "num_experts": 3,
            "expert_capacity": 3, "dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0,
        },
        top_k=1, num_experts=3, logits_of="router.classifier", executed=first_come, implementations=(None,),
        own_logits=False,
    ),
    Row(
        "glm4_moe", "Glm4MoeForCausalLM", "sigmoid, bias, top K",
        {
            "embedding": 1, "attention": 8, "dense_ffn": 3, "norm": 5, "routed_expert": 2, "router": 1,
            "shared_expert": 3, "head": 1,
        },
        NARROW, {"moe_intermediate_size": 8, "n_routed_experts": 4, "head_dim": 8, "first_k_dense_replace": 1},
        layers=(1,), executed=biased,
    ),
    Row(
        "dbrx", "DbrxForCausalLM", "softmax, top K",
        {"embedding": 1, "norm": 5, "attention": 4, "router": 2, "routed_expert": 6, "head": 1},
        {"w1": (8, 16), "v1": (8, 16), "w2": (16, 8)},
        {
            "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32,
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 16, "ffn_hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2},
        },
        logits_of="ffn.router.layer", implementations=(None,), own_logits=False,
    ),
    Row(
        "longcat_flash", "LongcatFlashForCausalLM", "softmax, bias, top K; identity experts",
        {"embedding": 1, "routed_expert": 2, "router": 1, "attention": 10, "norm": 9, "dense_ffn": 6, "head": 1},
        NARROW,
        {
            **LATENT, "head_dim": 4, "num_layers": 1, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2,
            "expert_ffn_hidden_size": 8, "ffn_hidden_size": 24,
        },
        num_experts=6, layers=(0,), logits_of="mlp.router", executed=biased_softmax, implementations=(None,),
        own_logits=False,
    ),
    Row(
        "gradreel's own", "MoELanguageModel", "softmax, top K",
        {
            "embedding": 1, "attention": 8, "norm": 5, "dense_ffn": 3, "router": 1, "routed_expert": 2,
            "shared_expert": 3,
        },
        NARROW,
        {
            "vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
            "max_positions": 32, "dense_hidden": 24, "expert_hidden": 8, "num_experts": 4, "top_k": 2,
            "moe_layers": (1,), "shared_hidden": 8,
        },
        layers=(1,), logits_of="mlp.router", implementations=(None,), own_logits=False,
    ),
]  # fmt: skip


def overview() -> str:
    """The README's table of families, a row each; how experts are kept is read off the tiny models."""
    pins = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text()
    version = re.search(r"^transformers==(\S+)", pins, re.MULTILINE)
    assert version, "constraints.txt pins no transformers"
    lines = [
        "| family | router | experts | implementations | read by | tested with |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in ROWS:
        model = row.build()
        layer = find_moe_layers(model)[0]
        family = family_of(layer.experts, layer.router)
        kinds = ", ".join(kind for kind in row.implementations if kind) or "its own"
        by = f"`traces/families/{family.name}.py`" if family else "general rules"
        tested = "this project" if row.model == "MoELanguageModel" else f"transformers {version.group(1)}"
        lines.append(f"| {row.name} | {row.router} | {_kept(model)} | {kinds} | {by} | {tested} |")
    lines.append("| any other | a module beside the experts | stacked, or a list | | general rules | own test models |")
    return "\n".join(lines)


def _kept(model: nn.Module) -> str:
    layer = find_moe_layers(model)[0]
    infos = [info for info in describe_params(model) if info.role == "routed_expert" and info.layer == layer.layer]
    words = ["a list of modules" if layer.is_list else "2-D, one after another" if layer.fused else "stacked"]
    stacks = [info for info in infos if info.matrix_axes is not None]
    transposed = [info.name.rpartition(".")[2] for info in stacks if info.matrix_axes == (2, 1)]
    if transposed:
        words.append("transposed" if len(transposed) == len(stacks) else f"`{', '.join(transposed)}` transposed")
    if any(info.expert_axis is not None and info.matrix_axes is None for info in infos):
        words.append("with biases")
    if layer.zero_experts:
        words.append("some without weights")
    return ", ".join(words)


if __name__ == "__main__":
    print(overview())
