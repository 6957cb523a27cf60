"""Roles, expert axes and layers of small models of every layout that detection knows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from traces.errors import GradreelError
from traces.executed_ids import read_experts_call, read_router_output
from traces.layouts import Layout, find_moe_layers
from traces.module_names import strip_wrappers
from traces.roles import classify_roles, describe_params, role_table


class StackedExperts(nn.Module):
    def __init__(self, experts: int, width: int, hidden: int, transposed: bool = False) -> None:
        super().__init__()
        shapes = [(experts, 2 * width, hidden), (experts, hidden, width)]
        if transposed:
            shapes = [(e, n, m) for e, m, n in shapes]
        self.gate_up_proj = nn.Parameter(torch.randn(shapes[0]))
        self.down_proj = nn.Parameter(torch.randn(shapes[1]))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * width))


class Moe(nn.Module):
    def __init__(self, experts: nn.Module, num_experts: int, hidden: int, router: str = "gate") -> None:
        super().__init__()
        self.add_module(router, nn.Linear(hidden, num_experts, bias=True))
        self.experts = experts
        self.shared_expert = nn.Linear(hidden, hidden)
        self.shared_expert_gate = nn.Linear(hidden, 1)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(num_experts), requires_grad=False)


class TinyBlock(nn.Module):
    def __init__(self, mlp: nn.Module, hidden: int) -> None:
        super().__init__()
        self.self_attn = nn.Linear(hidden, hidden)
        self.input_layernorm = nn.LayerNorm(hidden)
        self.hc_mix = nn.Linear(hidden, 4)
        self.attention_residual_scale = nn.Parameter(torch.ones(hidden))
        self.mlp = mlp


class TinyModel(nn.Module):
    def __init__(self, blocks: list[nn.Module], hidden: int, tied: bool = True) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(20, hidden)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, 20, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


def dense(hidden: int) -> nn.Module:
    return nn.ModuleDict({"gate_proj": nn.Linear(hidden, 12), "down_proj": nn.Linear(12, hidden)})


def tiny(transposed: bool = False, **options: bool) -> TinyModel:
    moe = Moe(StackedExperts(6, 5, 8, transposed), 6, 8)
    return TinyModel([TinyBlock(dense(8), 8), TinyBlock(moe, 8)], 8, **options)


def test_each_rule_gives_its_role() -> None:
    roles = classify_roles(tiny(tied=False))
    expected = {
        "embed_tokens.weight": "embedding",
        "layers.0.self_attn.weight": "attention",
        "layers.0.input_layernorm.bias": "norm",
        "layers.0.hc_mix.weight": "hyper_connection",
        "layers.0.attention_residual_scale": "other",
        "layers.0.mlp.gate_proj.weight": "dense_ffn",
        "layers.1.mlp.gate.weight": "router",
        "layers.1.mlp.gate.bias": "router",
        "layers.1.mlp.experts.gate_up_proj": "routed_expert",
        "layers.1.mlp.experts.down_proj": "routed_expert",
        "layers.1.mlp.experts.gate_up_proj_bias": "routed_expert",
        "layers.1.mlp.shared_expert.weight": "shared_expert",
        "layers.1.mlp.shared_expert_gate.weight": "shared_expert",
        "layers.1.mlp.e_score_correction_bias": "router_bias",
        "norm.weight": "norm",
        "lm_head.weight": "head",
    }
    assert {name: roles[name] for name in expected} == expected
    assert len(roles) == len(list(tiny(tied=False).named_parameters()))


def test_overrides_come_first_and_mistakes_are_named() -> None:
    roles = classify_roles(tiny(), {"layers.0.mlp.*": "routed_expert", "norm.weight": "other"})
    assert roles["layers.0.mlp.gate_proj.weight"] == "routed_expert"
    assert roles["norm.weight"] == "other"
    with pytest.raises(GradreelError, match=r"matches no parameter"):
        classify_roles(tiny(), {"nothing.*": "other"})
    with pytest.raises(GradreelError, match=r"unknown role 'expert'.*routed_expert"):
        classify_roles(tiny(), {"norm.weight": "expert"})


def test_tied_weights_appear_once_with_their_tie() -> None:
    infos = {info.name: info for info in describe_params(tiny())}
    assert "lm_head.weight" not in infos
    assert infos["embed_tokens.weight"].role == "embedding"
    assert "tied to lm_head.weight" in role_table(tiny())


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_rows_are_output_features(transposed: bool) -> None:
    infos = {info.name: info for info in describe_params(tiny(transposed))}
    gate_up, down = infos["layers.1.mlp.experts.gate_up_proj"], infos["layers.1.mlp.experts.down_proj"]
    for info, rows, columns in ((gate_up, 10, 8), (down, 8, 5)):
        assert (info.expert_axis, info.num_experts, info.layer) == (0, 6, 1)
        assert info.matrix_axes is not None
        assert [info.shape[axis] for axis in info.matrix_axes] == [rows, columns]
    bias = infos["layers.1.mlp.experts.gate_up_proj_bias"]
    assert (bias.expert_axis, bias.matrix_axes) == (0, None)
    assert infos["layers.1.mlp.gate.weight"].expert_axis is None
    assert infos["layers.0.self_attn.weight"].layer == 0
    assert infos["embed_tokens.weight"].layer is None


def test_square_transposed_experts_follow_the_module_or_the_declaration() -> None:
    experts = StackedExperts(6, 4, 8, transposed=True)  # gate_up is 8 x 8: the shape alone says nothing
    model = TinyModel([TinyBlock(Moe(experts, 6, 8), 8)], 8)
    by_neighbour = {i.name: i.matrix_axes for i in describe_params(model)}
    assert by_neighbour["layers.0.mlp.experts.gate_up_proj"] == (2, 1)
    layout = Layout(experts="*.experts", router="*.gate", transposed=False)
    declared = {i.name: i.matrix_axes for i in describe_params(model, layout=layout)}
    assert declared["layers.0.mlp.experts.down_proj"] == (1, 2)


def test_a_list_of_experts_beside_any_router() -> None:
    experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)) for _ in range(3))
    model = TinyModel([TinyBlock(Moe(experts, 3, 8, router="chooser"), 8)], 8)
    infos = {info.name: info for info in describe_params(model)}
    first = infos["layers.0.mlp.experts.2.0.weight"]
    assert (first.role, first.expert, first.expert_axis, first.layer) == ("routed_expert", 2, None, 0)
    assert infos["layers.0.mlp.chooser.weight"].role == "router"
    # the list of blocks is a list of equal modules too, but holds no experts
    assert find_moe_layers(model)[0].num_experts == 3


def test_convolutions_and_attention_heads_are_no_experts() -> None:
    model = nn.Module()
    model.conv = nn.Conv1d(6, 6, 3)
    model.heads = nn.Parameter(torch.randn(6, 2, 2))
    assert set(classify_roles(model).values()) == {"attention", "other"}
    with pytest.raises(GradreelError, match=r"no MoE layer.*Layout\(experts="):
        find_moe_layers(model)


def test_wrapper_prefixes_are_left_out() -> None:
    assert strip_wrappers("module._orig_mod.layers.0.mlp.weight") == "layers.0.mlp.weight"
    assert strip_wrappers("layers.0._checkpoint_wrapped_module.mlp") == "layers.0.mlp"
    wrapped = nn.Module()
    wrapped.module = tiny()
    assert classify_roles(wrapped) == classify_roles(tiny())


def test_layout_errors_name_what_is_wrong() -> None:
    with pytest.raises(GradreelError, match=r"no module is named like experts='\*\.bank'"):
        find_moe_layers(tiny(), {"experts": "*.bank"})
    with pytest.raises(GradreelError, match=r"allowed fields are experts, router"):
        find_moe_layers(tiny(), {"expert": "*"})
    with pytest.raises(GradreelError, match=r"router='\*\.wrong'"):
        find_moe_layers(tiny(), Layout(experts="*.experts", router="*.wrong"))


def test_two_moe_layers_in_one_block_are_counted() -> None:
    block = TinyBlock(Moe(StackedExperts(6, 5, 8), 6, 8), 8)
    block.second = Moe(StackedExperts(6, 5, 8), 6, 8)
    model = TinyModel([block], 8)
    assert [layer.layer for layer in find_moe_layers(model)] == [0, 1]
    infos = {info.name: info.layer for info in describe_params(model)}
    assert infos["layers.0.second.gate.weight"] == 1
    assert infos["layers.0.self_attn.weight"] is None


def test_reading_ids_from_calls_and_outputs() -> None:
    hidden, ids, weights = torch.randn(5, 8), torch.randint(0, 6, (5, 2)), torch.rand(5, 2)
    logits = torch.randn(5, 6)
    for args in ((hidden, ids, weights), (hidden, weights, ids)):
        capture = read_experts_call(args, {})
        assert capture is not None
        assert capture.topk_expert_ids is ids
        assert capture.scores is weights
    by_name = read_experts_call((hidden,), {"top_k_index": ids, "top_k_weights": weights})
    assert by_name is not None
    assert by_name.topk_expert_ids is ids
    assert read_experts_call((hidden,), {}) is None
    capture = read_router_output((logits, weights, ids), 6)
    assert capture.logits is logits
    assert capture.topk_expert_ids is ids
    assert read_router_output(logits, 6).topk_expert_ids is None


def test_role_table_lists_every_parameter_once() -> None:
    text = role_table(tiny())
    assert text.splitlines()[0].split() == ["role", "layer", "experts", "shape", "parameter"]
    assert sum("layers.1.mlp.experts.down_proj" in line for line in text.splitlines()) == 1
    assert "tied to lm_head.weight" in text
