"""Activations in closed form: what forward keeps for backward, from shapes, tokens and a few numbers of the config.

Rules, in bytes per token unless said otherwise; `a` is the size of an element of the main dtype, D the width of the
residual stream, H query heads of width d_k (values d_v), F an expert's hidden width, E experts, K top_k, V vocabulary:

- A norm keeps its input in float32 and, in the form most families have, the normalised copy: D (4 + a); 8 D where the
  weight is multiplied in float32 (gpt_oss, deepseek_v4), 4 D where one kernel does it all (this project's model).
- A linear map keeps its input once, however many maps share it.
- Attention keeps the input of its first maps, a D; each low-rank intermediate with its norm; norms of q and k, where a
  family has them; q, k and v as the kernel sees them (H heads where k and v are repeated, the key-value heads
  otherwise); the output, a H d_v. "flash" adds the log of the sum, 4 H; "eager" the scores after softmax in float32 and
  in a narrower main dtype, H S (4 + a), or in the main dtype alone, H S a (gpt_oss).
- A gated feed-forward layer of width W keeps gate, up, activation(gate) and their product: 4 a W; without a gate 2 a W.
  Clamped gates keep more: 3 a W (gpt_oss), 2 a W (deepseek_v4).
- Routed experts do the same for each of the K slots of a token, and keep the gathered input and the output before it is
  weighted: K a (2 D + 4 F); this project's model keeps the weighted output as well, K a D.
  Balanced loads are assumed, so expert parallelism changes nothing.
- deepseek_v4 keeps its parallel residual streams around each half of a block, 2 n D (8 + a), and more in attention.
- The router keeps logits, softmax and what the losses need, 16 E, and a float32 copy of its input, 4 D, where its
  weights are wider than the rest.
- The head keeps its input, a D, the logits, a V, and the log-softmax in float32, 4 V. The loss's backward needs two
  more float32 tensors of that size: workspace.

Tensor parallelism comes with sequence parallelism here: everything is divided by its degree. A pipeline stage keeps as
many micro-batches in flight as there are stages from it to the last (1F1B).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.memory._ranks import OUTPUT_SIDE, first_of
from toolkit.memory._settings import Run
from toolkit.memory._shapes import ITEMSIZE, Architecture
from traces.views import ParamInfo

_LOW_RANK = ("q_a_proj", "kv_a_proj")
#: Families whose norms multiply by their weight in float32.
_WIDE_NORMS = ("gpt_oss", "deepseek_v4")
#: What clamping a gate keeps besides, in hidden widths.
_CLAMPED = {"gpt_oss": 3.0, "deepseek_v4": 2.0}
_ASSUMED_HEAD = 128


@dataclass
class Block:
    """Widths of one block, in elements per token. `kept` maps what is kept to bytes per token."""

    kept: dict[str, float] = field(default_factory=dict)

    @property
    def bytes_per_token(self) -> float:
        """All of it."""
        return sum(self.kept.values())

    def without_feed_forward(self) -> float:
        """What selective checkpointing keeps: the insides of feed-forward layers and experts are computed again."""
        return self.bytes_per_token - self.kept.get("feed_forward", 0.0) - self.kept.get("experts", 0.0)


@dataclass(frozen=True)
class Activations:
    """Closed form for one pipeline stage of one rank, all in bytes.

    `kept`: what forward keeps. `loss`: workspace where the loss's backward begins. `recomputed`: what checkpointing
    brings back for one block. `logits`: the model's output, which a loop may hold until the step.
    """

    kept: int
    loss: int
    recomputed: int
    logits: int


def activations(
    arch: Architecture, params: Iterable[ParamInfo], run: Run, *, tensor: int, in_flight: int, last_stage: bool
) -> Activations:
    """Apply the rules above to the layers in `params`."""
    itemsize, tokens = ITEMSIZE[arch.main_dtype], run.batch * run.sequence
    width = _width(arch)
    layers: dict[int, list[ParamInfo]] = {}
    for info in params:
        if info.layer is not None:
            layers.setdefault(info.layer, []).append(info)
    streams = max(1, first_of(arch.config, "hc_mult"))  # parallel residual streams
    blocks = [_block(arch.config, infos, width, itemsize, run, streams) for infos in layers.values()]
    full = [block.bytes_per_token for block in blocks]
    light = [block.without_feed_forward() for block in blocks]
    entry = float(itemsize * width * streams)
    if run.checkpointing == "full":
        kept, recomputed = entry * len(blocks), max(full, default=0.0)
    elif run.checkpointing == "selective":
        kept = sum(light)
        recomputed = max((f - part for f, part in zip(full, light, strict=True)), default=0.0)
    else:
        kept, recomputed = sum(full), 0.0
    kept, loss, logits = kept * in_flight, 0.0, 0.0
    if last_stage:
        vocabulary = _vocabulary(arch)
        wide = max(4, itemsize)
        logits = float(itemsize * vocabulary)
        kept += _norm(width, itemsize, arch.config) + itemsize * width + logits + wide * vocabulary
        loss = 2.0 * wide * vocabulary
    share = tokens / tensor
    return Activations(*(round(share * value) for value in (kept, loss, recomputed, logits)))


def _block(
    config: Mapping[str, Any], infos: list[ParamInfo], width: int, itemsize: int, run: Run, streams: int
) -> Block:
    block = Block()
    norms = 2.0 * _norm(width, itemsize, config)
    if streams > 1:  # mixing the streams keeps them before and after, in float32, around each half
        norms += 2.0 * (streams * width * (2 * 4 + itemsize) + width * itemsize)
    block.kept["norms"] = norms
    block.kept["attention"] = _attention(config, infos, width, itemsize, run)
    dense = [p for p in infos if p.role in ("dense_ffn", "shared_expert") and p.matrix_axes is not None]
    inside = sum(_feed_forward(group, width, config) for group in _by_parent(dense)) * itemsize
    experts = [p for p in infos if p.role == "routed_expert" and p.matrix_axes is not None]
    if inside:
        block.kept["feed_forward"] = inside
    block.kept["input"] = float(itemsize * width) if inside or experts else 0.0
    if experts:
        one = [p for p in experts if p.expert in (None, 0)]
        slots = max(1, first_of(config, "num_experts_per_tok", "top_k", "num_experts_per_token", "moe_topk", "moe_k"))
        hidden = _feed_forward(one, width, config)
        block.kept["experts"] = slots * itemsize * ((3.0 if _is_ours(config) else 2.0) * width + hidden)
        count = max((p.num_experts or 0 for p in experts), default=0) or len({p.expert for p in experts})
        router = next((p for p in infos if p.role == "router"), None)
        wide = router is not None and ITEMSIZE.get(router.dtype, 4) > itemsize
        block.kept["router"] = 16.0 * count + (4.0 * width if wide else 0.0)
    return block


def _attention(config: Mapping[str, Any], infos: list[ParamInfo], width: int, itemsize: int, run: Run) -> float:
    matrices = [p for p in infos if p.role == "attention" and p.matrix_axes is not None]
    if not matrices:
        return 0.0
    outputs = [_size(p, 1) for p in matrices if OUTPUT_SIDE.search(p.name) and _size(p, 0) == width]
    heads = first_of(config, "num_attention_heads", "num_heads", "n_head")
    d_k, d_v = _head_widths(config, heads, width, max(outputs, default=width))
    heads = heads or max(1, max(outputs, default=width) // d_k)
    few = first_of(config, "num_key_value_heads", "num_kv_heads") or heads
    repeats = _is_ours(config) or bool(first_of(config, "kv_lora_rank")) or run.attention == "eager"
    kept = float(itemsize) * (width + (heads + (heads if repeats else few)) * (d_k + d_v))
    if any(".q_norm." in p.name for p in infos):
        kept += _norm((heads + few) * d_k, itemsize, config)
    groups = first_of(config, "o_groups")
    if groups:  # deepseek_v4: q normed by head without a weight, one norm for keys and values, a grouped output map
        kept += heads * d_k * (4.0 + 2.0 * itemsize) + _norm(few * d_k, itemsize, config)
        kept += groups * first_of(config, "o_lora_rank") * itemsize
    for matrix in matrices:  # a low-rank intermediate passes a norm and is the next map's input
        if any(word in matrix.name for word in _LOW_RANK):
            rank = _size(matrix, 0)
            kept += _norm(rank, itemsize, config) + itemsize * rank
    if run.attention == "eager":
        twice = itemsize < 4 and config.get("model_type") != "gpt_oss"
        return kept + heads * run.sequence * (itemsize + (4.0 if twice else 0.0))
    return kept + 4.0 * heads


def _head_widths(config: Mapping[str, Any], heads: int, width: int, output: int) -> tuple[int, int]:
    """Width of one query/key head and of one value head."""
    nope, rope = first_of(config, "qk_nope_head_dim"), first_of(config, "qk_rope_head_dim")
    if nope and rope:
        return nope + rope, first_of(config, "v_head_dim") or nope
    d_k = first_of(config, "head_dim") or (output // heads if heads else _ASSUMED_HEAD)
    return d_k, d_k


def _feed_forward(matrices: list[ParamInfo], width: int, config: Mapping[str, Any]) -> float:
    """Elements per token that one feed-forward layer keeps inside: pre-activations, activation and product."""
    into = [p for p in matrices if not OUTPUT_SIDE.search(p.name)]
    out = [p for p in matrices if OUTPUT_SIDE.search(p.name)]
    hidden = max((_size(p, 1) for p in out), default=0)
    before = sum(_size(p, 0) for p in into if _size(p, 1) == width or not hidden)
    if not hidden:
        return 2.0 * before
    gated = 2.0 + _CLAMPED.get(str(config.get("model_type")), 0.0)
    return before + (gated if before > hidden else 1.0) * hidden


def _by_parent(params: list[ParamInfo]) -> list[list[ParamInfo]]:
    groups: dict[str, list[ParamInfo]] = {}
    for info in params:
        parts = info.name.split(".")
        parent = ".".join(parts[:-2]) if len(parts) > 2 else info.role
        groups.setdefault(parent, []).append(info)
    return list(groups.values())


def _norm(width: int, itemsize: int, config: Mapping[str, Any]) -> float:
    copy = 4 if config.get("model_type") in _WIDE_NORMS else 0 if _is_ours(config) else itemsize
    return float(width * (max(4, itemsize) + copy))


def _is_ours(config: Mapping[str, Any]) -> bool:
    return "moe_layers" in config and "router_weights" in config


def _size(info: ParamInfo, which: int) -> int:
    assert info.matrix_axes is not None
    return info.shape[info.matrix_axes[which]]


def _width(arch: Architecture) -> int:
    told = first_of(arch.config, "hidden_size", "d_model", "n_embd")
    if told:
        return told
    table = _largest(arch, ("embedding", "head"))
    return _size(table, 1) if table is not None else 0


def _vocabulary(arch: Architecture) -> int:
    table = _largest(arch, ("head",)) or _largest(arch, ("embedding",))
    return _size(table, 0) if table is not None else 0


def _largest(arch: Architecture, roles: tuple[str, ...]) -> ParamInfo | None:
    found = [p for p in arch.params if p.role in roles and p.matrix_axes is not None]
    return max(found, key=lambda p: p.numel, default=None)
