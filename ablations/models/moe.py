"""A small, readable decoder with any mix of dense and mixture-of-experts blocks.

Legend: B sequences, S positions, T = B * S tokens, D hidden_size, E num_experts, K top_k, F expert_hidden,
H query heads, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ablations.models.config import MoEConfig
from traces.errors import GradreelError

__all__ = ["Experts", "MoEConfig", "MoELanguageModel", "Output", "Router", "router_losses"]


class Output(NamedTuple):
    """What a forward gives: logits [B, S, V] and, with labels, scalar losses (`loss` is their weighted sum)."""

    logits: Tensor
    loss: Tensor | None
    cross_entropy: Tensor | None
    aux_loss: Tensor
    z_loss: Tensor


class MoELanguageModel(nn.Module):
    """The model of a `MoEConfig`. Weights are drawn from torch's global generator: seed it for equal models."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        dtype = getattr(torch, config.dtype)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.position_embedding: nn.Embedding | None = None
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.max_positions, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = Norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if config.tied_head:
            self.lm_head.weight = self.embedding.weight
        self._initialise()

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding, under the name that tools for language models look for."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        """The head, under the name that tools for language models look for."""
        return self.lm_head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        """Predict the token that follows each position.

        `input_ids` int64 [B, S]; `attention_mask` [B, S], 0 or False at padding; `labels` int64 [B, S], already
        shifted (labels[b, s] is what follows input_ids[b, s]), negative where no loss is wanted. Padding is attended
        to by nothing and counts in no loss.
        """
        length, limit = input_ids.shape[1], self.config.max_positions
        if length > limit:
            raise GradreelError(f"input_ids are {length} long; allowed: up to max_positions = {limit}")
        real = None if attention_mask is None else attention_mask.bool()
        positions, visible = _positions_and_visibility(input_ids, real)
        hidden = self.embedding(input_ids)
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding(positions)
        aux_loss = z_loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for block in self.layers:
            hidden, aux, z = block(hidden, positions, visible, real)
            aux_loss, z_loss = aux_loss + aux, z_loss + z
        logits = self.lm_head(self.final_norm(hidden).to(self.lm_head.weight.dtype))
        if labels is None:
            return Output(logits, None, None, aux_loss, z_loss)
        wanted = labels if real is None else labels.masked_fill(~real, -1)
        wide = logits.flatten(0, 1).to(aux_loss.dtype)
        total = F.cross_entropy(wide, wanted.flatten().clamp(min=-1), ignore_index=-1, reduction="sum")
        cross_entropy = total / (wanted >= 0).sum().clamp(min=1)
        loss = cross_entropy + self.config.aux_coefficient * aux_loss + self.config.z_coefficient * z_loss
        return Output(logits, loss, cross_entropy, aux_loss, z_loss)

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue  # norms start at weight 1, bias 0
            if self.config.router_zero_init and name.endswith("router.weight"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, self.config.init_std)


class Block(nn.Module):
    """Attention, then a dense or a mixture-of-experts layer, each on a normalised copy of the residual stream."""

    def __init__(self, config: MoEConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(config), Norm(config)
        self.attention = Attention(config)
        self.is_moe = layer in config.moe_layers
        self.mlp: nn.Module = MoELayer(config) if self.is_moe else SwiGLU(config, config.dense_hidden)

    def forward(
        self, hidden: Tensor, positions: Tensor, visible: Tensor | None, real: Tensor | None
    ) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """`hidden` [B, S, D] -> the same, with the block's aux and z loss (0.0 for a dense block)."""
        attended = self.attention(self.attention_norm(hidden).to(hidden.dtype), positions, visible)
        hidden = hidden + attended
        normed = self.mlp_norm(hidden).to(hidden.dtype)
        if not self.is_moe:
            return hidden + self.mlp(normed), 0.0, 0.0
        out, aux, z = self.mlp(normed, real)
        return hidden + out, aux, z


class Attention(nn.Module):
    """Causal attention with H query heads over fewer heads of keys and values."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        dtype, head_dim = getattr(torch, config.dtype), config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * head_dim, bias=False, dtype=dtype)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * head_dim, bias=False, dtype=dtype)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * head_dim, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(config.num_heads * head_dim, config.hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        """`x` [B, S, D] -> [B, S, D]. `visible` bool [B, 1, S, S], None for plain causal."""
        batch, length, _ = x.shape
        # [B, heads, S, head_dim]
        q, k, v = (
            projection(x).view(batch, length, -1, self.config.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.positions == "rope":
            q, k = _rotate(q, positions, self.config.rope_theta), _rotate(k, positions, self.config.rope_theta)
        shared = self.config.num_heads // self.config.num_kv_heads
        if shared > 1:
            k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class SwiGLU(nn.Module):
    """The dense feed-forward layer; also the shared expert."""

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        dtype = getattr(torch, config.dtype)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoELayer(nn.Module):
    """Router, routed experts and, where configured, one shared expert."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_expert = SwiGLU(config, config.shared_hidden) if config.shared_hidden else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`x` [B, S, D], `real` bool [B, S] -> (output [B, S, D], aux loss, z loss)."""
        tokens = x.reshape(-1, x.shape[-1])
        logits, weights, indices = self.router(tokens)
        out = self.experts(tokens, indices, weights).view_as(x)
        if self.shared_expert is not None:
            out = out + self.shared_expert(x)
        aux, z = router_losses(logits, indices, None if real is None else real.flatten())
        return out, aux, z


class Router(nn.Module):
    """A linear map to E logits and the choice of the K largest; of equal logits the lowest index wins."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=_wide(config)))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`tokens` [T, D] -> (router_logits [T, E], weights [T, K], topk_expert_ids int64 [T, K]).

        The logits are the ones acted on: before softmax, with the noise of training.
        """
        config = self.config
        logits = F.linear(tokens.to(self.weight.dtype), self.weight)
        if self.training and config.router_noise > 0:
            logits = logits + config.router_noise * torch.randn_like(logits)
        indices = _largest(logits.detach(), config.top_k)
        if config.router_weights == "topk_softmax":
            weights = logits.gather(1, indices).softmax(dim=-1)
        else:
            weights = logits.softmax(dim=-1).gather(1, indices)
            if config.router_weights == "softmax_topk_renormalised":
                weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(tokens.dtype), indices


class Experts(nn.Module):
    """E SwiGLU experts in two stacked parameters: `gate_up_proj` [E, 2F, D] (gate rows first), `down_proj` [E, D, F].

    An expert without tokens gets an exact-zero slice of gradient.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts, self.grouped = config.num_experts, config.expert_compute == "grouped"
        dtype, width, size = getattr(torch, config.dtype), config.expert_hidden, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * width, size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, size, width, dtype=dtype))

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """`tokens` [T, D], `indices` int64 [T, K], `weights` [T, K] -> [T, D], the weighted sum of K experts."""
        top_k = indices.shape[1]
        expert_of_slot = indices.flatten()  # slot = token * K + rank
        order = torch.argsort(expert_of_slot, stable=True)
        counts = torch.bincount(expert_of_slot, minlength=self.num_experts).tolist()
        parts = (self._grouped if self.grouped else self._loop)(tokens[order // top_k], counts)
        weighted = parts * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // top_k, weighted)

    def _loop(self, slots: Tensor, counts: list[int]) -> Tensor:
        """`slots` [T*K, D] sorted by expert, `counts` of each -> [T*K, D], each passed through its expert."""
        # Unbinding once costs one stack in backward; indexing expert by expert would cost E full-size gradients.
        per_expert = zip(slots.split(counts), self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        parts = []
        for mine, gate_up, down in per_expert:
            gate, up = F.linear(mine, gate_up).chunk(2, dim=-1)
            parts.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(parts)

    def _grouped(self, slots: Tensor, counts: list[int]) -> Tensor:
        """As `_loop`, with one node of the graph per projection instead of several per expert."""
        gate, up = GroupedLinear.apply(slots, self.gate_up_proj, counts).chunk(2, dim=-1)
        return GroupedLinear.apply(F.silu(gate) * up, self.down_proj, counts)


class GroupedLinear(torch.autograd.Function):
    """`slots` [S, D] sorted by expert, `weight` [E, O, D], `counts` of slots per expert -> [S, O]; once differentiable.

    Each product is written where it belongs, so no stack of E gradients is ever copied together.
    """

    @staticmethod
    def forward(ctx: Any, slots: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        """See the class."""
        ctx.save_for_backward(slots, weight)
        ctx.counts = counts
        out = slots.new_empty(len(slots), weight.shape[1])
        for mine, transposed, place in zip(
            slots.split(counts), weight.transpose(1, 2).unbind(), out.split(counts), strict=True
        ):
            if len(mine):
                torch.mm(mine, transposed, out=place)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of `slots` and of `weight`; that of an expert without slots is exactly zero."""
        (slots, weight), counts, grad = ctx.saved_tensors, ctx.counts, grads[0].contiguous()
        of_slots, of_weight = torch.empty_like(slots), torch.empty_like(weight)
        for mine, own, part, place, gradient in zip(
            slots.split(counts),
            weight.unbind(),
            grad.split(counts),
            of_slots.split(counts),
            of_weight.unbind(),
            strict=True,
        ):
            if len(mine):
                torch.mm(part, own, out=place)
                torch.mm(part.t(), mine, out=gradient)
            else:
                gradient.zero_()
        return of_slots, of_weight, None


def _largest(logits: Tensor, count: int) -> Tensor:
    """Indices int64 [T, count] of the largest of `logits` [T, E], in order; of equal ones the lowest index first."""
    if count == 1:
        return logits.argmax(dim=-1, keepdim=True)
    # topk leaves the order of ties open; a stable sort does not.
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :count]


def router_losses(logits: Tensor, indices: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The load-balancing loss and the z loss of one layer, scalars, over the tokens that are not padding.

    aux = E * sum over experts of (mean probability * share of the T * K assignments), 1 under perfect balance;
    z = mean of logsumexp(logits)^2 (Switch Transformer, arXiv 2101.03961, eq. 4; ST-MoE, arXiv 2202.08906, eq. 5).
    `logits` [T, E], `indices` [T, K], `real` bool [T].
    """
    if real is not None:
        logits, indices = logits[real], indices[real]
    num_experts = logits.shape[1]
    if logits.shape[0] == 0:
        return logits.sum(), logits.sum()
    share = torch.bincount(indices.flatten(), minlength=num_experts).to(logits.dtype) / indices.numel()
    aux = num_experts * (logits.softmax(dim=-1).mean(dim=0) * share).sum()
    return aux, logits.logsumexp(dim=-1).square().mean()


def _positions_and_visibility(input_ids: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Positions int64 [B, S], counted over real tokens, and who sees whom, bool [B, 1, S, S] (None: plain causal)."""
    length = input_ids.shape[1]
    steps = torch.arange(length, device=input_ids.device)
    if real is None:
        return steps.expand_as(input_ids), None
    positions = (real.cumsum(dim=1) - 1).clamp(min=0)
    causal = steps.unsqueeze(1) >= steps
    itself = torch.eye(length, dtype=torch.bool, device=input_ids.device)  # else padding would see nothing: NaN
    return positions, ((causal & real[:, None, :]) | itself).unsqueeze(1)


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions (arXiv 2104.09864), halves paired. `x` [B, heads, S, head_dim], `positions` [B, S]."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    angle = positions[:, None, :, None].to(wide) * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Norm(nn.Module):
    """LayerNorm or RMSNorm computed in the dtype of its own weight, which is float32 in a bfloat16 model."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size, dtype=_wide(config)))
        self.bias: nn.Parameter | None = None
        if config.norm == "layernorm":
            self.bias = nn.Parameter(torch.zeros(config.hidden_size, dtype=_wide(config)))

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., D] in the norm's dtype."""
        x = x.to(self.weight.dtype)
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _wide(config: MoEConfig) -> torch.dtype:
    return torch.float64 if config.dtype == "float64" else torch.float32
