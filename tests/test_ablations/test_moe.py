"""The model against a loop over tokens, and the sizes of the published study."""

import dataclasses

import pytest
import torch
from torch import Tensor

from ablations.models.moe import MoEConfig, MoELanguageModel
from traces import GradreelError

TINY = MoEConfig(
    vocab_size=17,
    hidden_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_positions=16,
    dense_hidden=10,
    expert_hidden=7,
    num_experts=5,
    top_k=2,
    moe_layers=(0, 2),
    aux_coefficient=0.05,
    z_coefficient=1e-2,
    init_std=0.4,
    dtype="float64",
)


def build(**changes: object) -> MoELanguageModel:
    torch.manual_seed(1)
    return MoELanguageModel(dataclasses.replace(TINY, **changes))


def batch_of(length: int = 9, batch: int = 3) -> tuple[Tensor, Tensor]:
    ids = torch.randint(17, (batch, length + 1), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1], ids[:, 1:]


# --- an independent forward: one token, one head, one expert at a time -------------------------------------------


def naive_norm(norm: torch.nn.Module, x: Tensor, eps: float) -> Tensor:
    if norm.bias is None:
        return x / (x.pow(2).mean() + eps).sqrt() * norm.weight
    return (x - x.mean()) / (x.var(unbiased=False) + eps).sqrt() * norm.weight + norm.bias


def naive_turn(x: Tensor, position: int, theta: float) -> Tensor:
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-i / half), dtype=x.dtype)
        out[i] = x[i] * angle.cos() - x[half + i] * angle.sin()
        out[half + i] = x[half + i] * angle.cos() + x[i] * angle.sin()
    return out


def naive_attention(attention: torch.nn.Module, xs: list[Tensor], config: MoEConfig) -> list[Tensor]:
    d, out = config.head_dim, []

    def head(weight: Tensor, x: Tensor, h: int, position: int, turn: bool) -> Tensor:
        y = weight[h * d : (h + 1) * d] @ x
        return naive_turn(y, position, config.rope_theta) if turn and config.positions == "rope" else y

    for i, x in enumerate(xs):
        mixed = []
        for h in range(config.num_heads):
            shared = h // (config.num_heads // config.num_kv_heads)
            q = head(attention.q_proj.weight, x, h, i, True)
            keys = [head(attention.k_proj.weight, xs[j], shared, j, True) for j in range(i + 1)]
            share = torch.stack([q @ k / d**0.5 for k in keys]).softmax(0)
            mixed.append(sum(share[j] * head(attention.v_proj.weight, xs[j], shared, j, False) for j in range(i + 1)))
        out.append(attention.o_proj.weight @ torch.cat(mixed))
    return out


def naive_swiglu(gate: Tensor, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    g = gate @ x
    return down @ (g * g.sigmoid() * (up @ x))


def naive_moe(layer: torch.nn.Module, x: Tensor, config: MoEConfig) -> tuple[Tensor, Tensor, list[int]]:
    logits = layer.router.weight @ x
    chosen = sorted(range(config.num_experts), key=lambda e: (-logits[e].item(), e))[: config.top_k]
    scores = logits.softmax(0)
    whole = 1.0 if config.router_weights == "softmax_topk" else sum(scores[e] for e in chosen)
    out = torch.zeros_like(x)
    for e in chosen:
        gate_up, width = layer.experts.gate_up_proj[e], config.expert_hidden
        value = naive_swiglu(gate_up[:width], gate_up[width:], layer.experts.down_proj[e], x)
        out = out + scores[e] / whole * value
    if layer.shared_expert is not None:
        s = layer.shared_expert
        out = out + naive_swiglu(s.gate_proj.weight, s.up_proj.weight, s.down_proj.weight, x)
    return out, logits, chosen


def naive_loss(model: MoELanguageModel, inputs: Tensor, labels: Tensor) -> Tensor:
    config, losses = model.config, []
    seen: dict[int, list[tuple[Tensor, list[int]]]] = {layer: [] for layer in config.moe_layers}
    for ids, wanted in zip(inputs.tolist(), labels.tolist(), strict=True):
        xs = [model.embedding.weight[i] for i in ids]
        if model.position_embedding is not None:
            xs = [x + model.position_embedding.weight[p] for p, x in enumerate(xs)]
        for number, block in enumerate(model.layers):
            attended = naive_attention(
                block.attention, [naive_norm(block.attention_norm, x, config.norm_eps) for x in xs], config
            )
            xs = [x + a for x, a in zip(xs, attended, strict=True)]
            for p, x in enumerate(xs):
                normed = naive_norm(block.mlp_norm, x, config.norm_eps)
                if number in config.moe_layers:
                    out, logits, chosen = naive_moe(block.mlp, normed, config)
                    seen[number].append((logits, chosen))
                else:
                    m = block.mlp
                    out = naive_swiglu(m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight, normed)
                xs[p] = x + out
        for x, target in zip(xs, wanted, strict=True):
            losses.append(
                -(model.lm_head.weight @ naive_norm(model.final_norm, x, config.norm_eps)).log_softmax(0)[target]
            )
    loss = torch.stack(losses).mean()
    for tokens in seen.values():
        probability = torch.stack([logits.softmax(0) for logits, _ in tokens]).mean(0)
        counts = [sum(e in chosen for _, chosen in tokens) for e in range(config.num_experts)]
        share = torch.tensor(counts, dtype=loss.dtype) / (len(tokens) * config.top_k)
        loss = loss + config.aux_coefficient * config.num_experts * (probability * share).sum()
        loss = loss + config.z_coefficient * torch.stack([logits.exp().sum().log() ** 2 for logits, _ in tokens]).mean()
    return loss


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "learned", "norm": "layernorm", "tied_head": False, "shared_hidden": 6},
        {"router_weights": "topk_softmax", "num_kv_heads": 4, "top_k": 5},
        {"router_weights": "softmax_topk", "num_kv_heads": 1, "top_k": 1, "moe_layers": (0, 1, 2)},
    ],
    ids=["default", "learned", "topk_softmax", "softmax_topk"],
)
@pytest.mark.parametrize("compute", ["loop", "grouped"])
def test_forward_and_backward_equal_a_loop_over_tokens(changes: dict[str, object], compute: str) -> None:
    model = build(**changes, expert_compute=compute)
    inputs, labels = batch_of(length=6, batch=2)
    loss = model(inputs, labels=labels).loss
    expected = naive_loss(model, inputs, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    parameters = list(model.parameters())
    got, want = torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    for (name, _), g, w in zip(model.named_parameters(), got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_the_study_is_one_config() -> None:
    with torch.device("meta"):
        model = MoELanguageModel(MoEConfig.skewadam_study())
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    router = sum(n for name, n in sizes.items() if ".router." in name)
    assert sum(sizes.values()) == 6_784_327_680
    assert experts == 6_442_450_944 == 384 * 4096 * 4096
    assert router == 524_288
    assert sum(sizes.values()) - experts - router == 341_352_448
    assert sum(p.nbytes for p in model.parameters()) == 13_569_785_856
    assert sizes["layers.1.mlp.experts.gate_up_proj"] + sizes["layers.1.mlp.experts.down_proj"] == 3 * 2**31


@pytest.mark.parametrize("compute", ["loop", "grouped"])
def test_idle_experts_get_exact_zero_slices(compute: str) -> None:
    model = build(moe_layers=(1,), top_k=1, num_layers=2, expert_compute=compute)
    with torch.no_grad():
        model.layers[1].mlp.router.weight[3:] = 0
        model.layers[1].mlp.router.weight[:3] *= 100
    inputs, labels = batch_of()
    executed: list[Tensor] = []
    model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, args: executed.append(args[1]))
    model(inputs, labels=labels).loss.backward()
    used = set(executed[0].flatten().tolist())
    assert used < set(range(5))
    for parameter in model.layers[1].mlp.experts.parameters():
        for e in range(5):
            assert bool((parameter.grad[e] != 0).any()) == (e in used)


@pytest.mark.parametrize("top_k", [1, 3])
def test_of_equal_logits_the_lowest_index_wins(top_k: int) -> None:
    model = build(router_zero_init=True, num_experts=64, top_k=top_k, expert_hidden=2)
    logits, weights, indices = model.layers[0].mlp.router(torch.randn(50, 12, dtype=torch.float64))
    assert logits.shape == (50, 64)
    assert indices.tolist() == [list(range(top_k))] * 50
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / top_k))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_padding_changes_neither_loss_nor_gradient(side: str, positions: str) -> None:
    model = build(positions=positions)
    inputs, labels = batch_of(length=8)
    plain = model(inputs, labels=labels)
    want = torch.autograd.grad(plain.loss, list(model.parameters()), allow_unused=True)
    pad = torch.full_like(inputs, 5)
    order = (pad, inputs) if side == "left" else (inputs, pad)
    mask = torch.cat([torch.full_like(x, int(x is inputs)) for x in order], dim=1)
    wide_labels = torch.cat([labels if x is inputs else pad for x in order], dim=1)
    padded = model(torch.cat(order, dim=1), attention_mask=mask, labels=wide_labels)
    for name in ("loss", "cross_entropy", "aux_loss", "z_loss"):
        torch.testing.assert_close(getattr(padded, name), getattr(plain, name), rtol=1e-11, atol=1e-12)
    got = torch.autograd.grad(padded.loss, list(model.parameters()), allow_unused=True)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-11)


def test_a_batch_of_nothing_but_padding_has_loss_zero() -> None:
    model = build()
    inputs, labels = batch_of()
    out = model(inputs, attention_mask=torch.zeros_like(inputs), labels=labels)
    assert out.loss.item() == 0.0
    out.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_noise_acts_in_training_only() -> None:
    model = build(router_noise=0.5)
    router, tokens = model.layers[0].mlp.router, torch.randn(40, 12, dtype=torch.float64)
    clean = tokens @ router.weight.T
    model.eval()
    torch.testing.assert_close(router(tokens)[0], clean)
    model.train()
    noise = router(tokens)[0] - clean
    assert 0.3 < noise.std().item() < 0.7


def test_bfloat16_keeps_router_and_norms_wide() -> None:
    model = build(dtype="bfloat16")
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {name for name, _ in model.named_parameters() if "router" in name or "norm" in name}
    inputs, labels = batch_of()
    out = model(inputs, labels=labels)
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    assert out.loss.isfinite()


def test_equal_seeds_give_equal_models_and_losses() -> None:
    inputs, labels = batch_of()
    first, second = build(), build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(first(inputs, labels=labels).loss, second(inputs, labels=labels).loss)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 6}, r"top_k is 6; allowed: \[1, num_experts = 5\]"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"moe_layers": (3,)}, r"moe_layers is \(3,\)"),
        ({"norm": "batchnorm"}, "layernorm, rmsnorm"),
        ({"router_noise": -1.0}, "router_noise is -1.0"),
        ({"hidden_size": 0}, "hidden_size is 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(changes: dict[str, object], words: str) -> None:
    with pytest.raises(GradreelError, match=words):
        dataclasses.replace(TINY, **changes)


def test_too_long_a_sequence_is_named() -> None:
    with pytest.raises(GradreelError, match="17 long; allowed: up to max_positions = 16"):
        build()(torch.zeros(1, 17, dtype=torch.int64))
