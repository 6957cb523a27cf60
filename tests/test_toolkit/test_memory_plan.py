"""Plans against what is really allocated: state byte for byte, activations within two percent."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn

from ablations.models import MoELanguageModel
from ablations.models.expert_list import list_experts
from ablations.presets import PRESETS
from toolkit.frame import SCHEMA
from toolkit.memory import Parallel, Precision, Run, architecture, build_on_meta, plan_memory, shape_table
from toolkit.memory._activations import activations
from toolkit.memory._plan import CATEGORIES, FIXED, PHASES, Planner
from toolkit.memory._ranks import _needs_whole
from toolkit.memory._units import both, parse_bytes, parse_gpus
from toolkit.optim import make_optimizer
from toolkit.recipes import RECIPES
from toolkit.variants import recipe
from traces.errors import GradreelError
from traces.views import ParamInfo

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
MLA = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 40, "num_local_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 4, "head_dim": 8},
    "olmoe": {"intermediate_size": 24, "num_experts": 4, "eos_token_id": 1},
    "gpt_oss": {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8},
    "deepseek_v3": {
        "moe_intermediate_size": 24,
        "intermediate_size": 40,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        **MLA,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 12,
        "o_groups": 2,
        "o_lora_rank": 8,
        "hc_mult": 2,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "hc_sinkhorn_iters": 2,
        "swiglu_limit": 1e9,
        "layer_types": ["sliding_attention"] * 2,
        "mlp_layer_types": ["moe"] * 2,
        "partial_rotary_factor": 0.5,
    },
}
NAMES = [*RECIPES.names(), "mesh+adam_rest", "muon(compat=study)", "skewadam(tiers=uniform)"]
SLOW = [name for name in NAMES if name.startswith(("apollo", "galore", "muon"))]  # on the demo's larger matrices


def _config(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, **FAMILIES[family], **changes}


def _demo() -> nn.Module:
    torch.manual_seed(0)
    return MoELanguageModel(PRESETS.get("demo").model)


def _real(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    if family == "demo":
        return _demo()
    torch.manual_seed(0)
    from transformers import AutoConfig, AutoModelForCausalLM

    values = _config(family, **changes)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values), dtype=dtype)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("demo", [name for name in NAMES if name not in SLOW]),
        pytest.param("demo", SLOW, marks=pytest.mark.full),
        *((family, NAMES) for family in FAMILIES),
    ],
)
def test_state_is_what_a_real_step_allocates(family: str, names: list[str]) -> None:
    """Gradients come from a backward pass; the optimizer is the real one; every byte it keeps was planned."""
    model = _real(family, torch.bfloat16 if family == "mixtral" else torch.float32)
    tokens = torch.randint(0, 64, (2, 8))
    nn.functional.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1).float(), tokens.flatten()).backward()
    gradients = {p: p.grad.clone() for p in model.parameters()}
    planner = Planner(architecture(model))
    for name in names:
        plan = planner.plan(recipe(name), precision=Precision(), parallel=Parallel(), run=Run())
        model.zero_grad()
        optimizer = make_optimizer(model, name)
        for parameter, gradient in gradients.items():
            # Narrow parameters whose momentum hides in the gradient take float32 gradients.
            parameter.grad = gradient.to(parameter.grad_dtype or parameter.dtype, copy=True)
        optimizer.step()
        kept = [(key, t.nbytes) for slots in optimizer.state.values() for key, t in slots.items()]
        counters = sum(size for key, size in kept if key == "step")
        assert plan.bytes_of("step_counter_bytes") == counters, name
        assert plan.state_bytes + plan.pinned_gradient_bytes == sum(size for _, size in kept) - counters, name
        assert plan.state_bytes == optimizer.state_bytes, name
        assert plan.pinned_gradient_bytes == optimizer.pinned_gradient_bytes, name
        for hidden in optimizer._hidden.values():
            hidden.close()
    assert plan.bytes_of("weight_bytes") == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert plan.bytes_of("gradient_bytes") == sum(g.nbytes for g in gradients.values())


def test_every_form_of_a_source_gives_the_same_table(tmp_path) -> None:
    config = _config("mixtral")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "quantization_config": {"bits": 4}, "architectures": ["MixtralForCausalLM"]}))
    real = _real("mixtral")
    tables = [
        shape_table(s) for s in (real, real.config, config, file, str(file), str(tmp_path), build_on_meta(config))
    ]
    bare = [replace(p, strides=None) for p in tables[0]]
    for table in (*tables, shape_table(bare)):
        assert [replace(p, strides=None) for p in table] == bare
    trace = SimpleNamespace(infos={p.name: p for p in bare}, header=None, path="x/run.trace")
    assert architecture(trace).name == "run.trace"
    assert shape_table(trace) == bare


def test_a_tied_table_counts_once_and_a_frozen_one_has_no_gradient() -> None:
    model = _real("olmoe", tie_word_embeddings=True)
    plan = plan_memory(model, "adamw")
    assert plan.bytes_of("weight_bytes") == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    model.get_input_embeddings().weight.requires_grad_(False)
    frozen = plan_memory(model, "adamw")
    size = model.get_input_embeddings().weight.nbytes
    assert frozen.bytes_of("weight_bytes") == plan.bytes_of("weight_bytes")
    assert plan.bytes_of("gradient_bytes") - frozen.bytes_of("gradient_bytes") == size
    assert plan.state_bytes - frozen.state_bytes == 2 * size


def _saved_bytes(model: nn.Module, tokens: torch.Tensor) -> int:
    """Bytes of storages that autograd holds after forward, parameters left out, and of the logits."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(input_ids=tokens, labels=tokens)
    seen[out.logits.untyped_storage().data_ptr()] = out.logits
    return sum(t.untyped_storage().nbytes() for t in seen.values())


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        ("study", torch.float32, 0.02),
        ("mixtral", torch.bfloat16, 0.02),
        ("qwen3_moe", torch.bfloat16, 0.02),
        ("olmoe", torch.float32, 0.02),
        ("gpt_oss", torch.bfloat16, 0.02),
        ("deepseek_v3", torch.bfloat16, 0.02),
        ("deepseek_v4", torch.float32, 0.1),  # its compressed attention is followed roughly
    ],
)
def test_activations_against_what_autograd_holds(family: str, dtype: torch.dtype, tolerance: float) -> None:
    wide = {"vocab_size": 256, "hidden_size": 128, "num_attention_heads": 8, "num_experts_per_tok": 4}
    more = {"head_dim": 16} if "head_dim" in FAMILIES.get(family, {}) else {}
    more |= {"num_key_value_heads": 8, "q_lora_rank": 48, "kv_lora_rank": 32} if family == "deepseek_v3" else {}
    more |= {"n_routed_experts": 8} if family.startswith("deepseek") else {"num_experts": 8, "num_local_experts": 8}
    if family == "study":  # its small form: on a CPU, rotary positions and RMSNorm copy where a GPU does not
        model = list_experts(
            MoELanguageModel(replace(PRESETS.get("demo").model, positions="learned", norm="layernorm"))
        )
    else:
        given = {k: v for k, v in {**wide, **more}.items() if k in (*SIZES, *FAMILIES[family])}
        model = _real(family, dtype, attn_implementation="eager" if family[:4] in ("gpt_", "deep") else "sdpa", **given)
    attention = "eager" if getattr(model.config, "_attn_implementation", "") == "eager" else "flash"
    batch, sequence = 2, 64
    arch = architecture(model)
    run = Run(batch=batch, sequence=sequence, attention=attention)
    planned = activations(arch, arch.params, run, tensor=1, in_flight=1, last_stage=True).kept
    saved = _saved_bytes(model.train(), torch.randint(0, 256, (batch, sequence)))
    assert planned == pytest.approx(saved, rel=tolerance)


TABLE = [
    ParamInfo("embedding.weight", "embedding", (64, 16), "bfloat16", matrix_axes=(0, 1)),
    *(
        info
        for layer in range(4)
        for info in (
            ParamInfo(f"{layer}.norm", "norm", (16,), "bfloat16", layer),
            ParamInfo(f"{layer}.q_proj.weight", "attention", (16, 16), "bfloat16", layer, matrix_axes=(0, 1)),
            ParamInfo(f"{layer}.o_proj.weight", "attention", (16, 16), "bfloat16", layer, matrix_axes=(0, 1)),
            ParamInfo(f"{layer}.gate.weight", "router", (8, 16), "float32", layer, matrix_axes=(0, 1)),
            ParamInfo(f"{layer}.up", "routed_expert", (8, 24, 16), "bfloat16", layer, None, 0, 8, (1, 2)),
            ParamInfo(f"{layer}.down", "routed_expert", (8, 16, 24), "bfloat16", layer, None, 0, 8, (1, 2)),
        )
    ),
    ParamInfo("head.weight", "head", (64, 16), "bfloat16", matrix_axes=(0, 1)),
]
WHOLE = sum(p.numel for p in TABLE)


def test_precision_changes_what_it_says() -> None:
    plain = plan_memory(TABLE, "adamw")
    assert plain.bytes_of("weight_bytes") == plain.bytes_of("gradient_bytes") == 2 * WHOLE + 2 * 4 * 8 * 16
    assert plan_memory(TABLE, "adamw", gradients="float32").bytes_of("gradient_bytes") == 4 * WHOLE
    assert plan_memory(TABLE, "adamw", weights="float32").bytes_of("weight_bytes") == 4 * WHOLE
    assert plan_memory(TABLE, "adamw", accumulation="float32").bytes_of("gradient_bytes") == 4 * WHOLE
    master = plan_memory(TABLE, "adamw", master="float32")
    assert master.bytes_of("master_weight_bytes") == 4 * WHOLE
    assert master.state_bytes == plain.state_bytes == 8 * WHOLE
    # Weights are rounded stochastically without a master copy, which takes a counter; mesh counts nothing else.
    assert plan_memory(TABLE, "mesh", master="float32").bytes_of("step_counter_bytes") < (
        plan_memory(TABLE, "mesh").bytes_of("step_counter_bytes")
    )
    moved = plan_memory(TABLE, "adamw", master="float32", offload=True)
    assert moved.state_bytes == moved.bytes_of("master_weight_bytes") == 0
    assert moved.host_bytes == 12 * WHOLE + master.bytes_of("step_counter_bytes")


def test_hidden_momentum_is_pinned_and_replaces_the_gradient() -> None:
    experts = sum(p.numel for p in TABLE if p.role == "routed_expert")
    attached, apart = plan_memory(TABLE, "mesh"), plan_memory(TABLE, "mesh", hidden_momentum="apart")
    assert attached.pinned_gradient_bytes == apart.pinned_gradient_bytes == 4 * experts
    assert apart.bytes_of("gradient_bytes") - attached.bytes_of("gradient_bytes") == 2 * experts
    assert any("pinned" in note for note in attached.notes)
    assert not any("pinned" in note for note in apart.notes)
    # Several processes reduce gradients, so momentum cannot hide there.
    assert plan_memory(TABLE, "mesh", data=2).bytes_of("gradient_bytes") == apart.bytes_of("gradient_bytes")


def test_phases_are_sums_of_categories() -> None:
    plan = plan_memory(TABLE, "adamw", batch=2, sequence=32)
    assert set(plan.phases) == set(PHASES)
    assert {category for category, _ in plan.rows} <= set(CATEGORIES)
    fixed = sum(plan.bytes_of(category) for category in FIXED)
    step = plan.phases["optimizer step"]
    logits = 2 * 32 * 64 * 2
    assert step == fixed + plan.bytes_of("gradient_bytes") + plan.bytes_of("step_temporary_bytes") + logits
    begins = plan.phases["backward begins"]
    loss = 2 * 4 * 2 * 32 * 64
    assert begins == fixed + plan.bytes_of("activation_bytes") + loss
    several = plan_memory(TABLE, "adamw", batch=2, sequence=32, micro_steps=2)
    assert several.phases["backward begins"] == begins + plan.bytes_of("gradient_bytes")
    assert plan.peak_bytes == max(plan.phases.values())
    assert plan.fits(plan.peak_bytes / 2**30)
    assert not plan.fits((plan.peak_bytes - 1) / 2**30)


def test_checkpointing_keeps_less_and_computes_a_block_again() -> None:
    kept = {c: plan_memory(TABLE, "adamw", checkpointing=c, sequence=64) for c in ("none", "selective", "full")}
    sizes = [kept[c].bytes_of("activation_bytes") for c in ("none", "selective", "full")]
    assert sizes[0] > sizes[1] > sizes[2] > 0
    blocks = 4 * 64 * 16 * 2  # the input of each block, bfloat16
    head = 64 * (16 * (4 + 2) + 2 * 16 + 64 * (2 + 4))
    assert sizes[2] == blocks + head


def test_fsdp_shards_what_each_rank_steps_alone() -> None:
    one, eight = plan_memory(TABLE, "adamw"), plan_memory(TABLE, "adamw", fsdp=8)
    assert eight.state_bytes * 8 == one.state_bytes
    assert eight.bytes_of("gradient_bytes") * 8 == one.bytes_of("gradient_bytes")
    # 3 ranks: the fullest holds the larger part, 22 of 64 rows, 6 of 16, 3 of 8 experts.
    three = plan_memory(TABLE, "adamw", fsdp=3)
    assert three.bytes_of("state_bytes", "embedding") == 8 * 22 * 16
    assert three.bytes_of("state_bytes", "routed_expert") == 8 * 4 * (3 * 24 * 16 + 3 * 16 * 24)
    # Factored moments need whole matrices: experts are whole on their rank, the rest is gathered.
    skew = plan_memory(TABLE, "skewadam", fsdp=8)
    assert skew.bytes_of("state_bytes", "attention") == plan_memory(TABLE, "skewadam").bytes_of(
        "state_bytes", "attention"
    )
    assert skew.bytes_of("state_bytes", "routed_expert") == 4 * 4 * 2 * (24 + 16)
    assert any("gathers" in note for note in skew.notes)


@pytest.mark.parametrize("name", NAMES)
def test_the_rule_of_gathering_is_that_of_the_optimizer(name: str, monkeypatch) -> None:
    from torch.distributed.tensor import Shard as Cut

    from toolkit.optim._shards import Shard

    monkeypatch.setattr(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        lambda shape, mesh, placements: (tuple(shape), (0,) * len(shape)),
    )
    turned = ParamInfo("turned", "routed_expert", (4, 6, 8), expert_axis=0, num_experts=4, matrix_axes=(2, 1))
    second = ParamInfo("second", "routed_expert", (6, 4, 8), expert_axis=1, num_experts=4, matrix_axes=(0, 2))
    for info in (*TABLE, turned, second):
        parameter = SimpleNamespace(placements=(Cut(0),), shape=info.shape, device_mesh=None)
        assert Shard(parameter, info, recipe(name)).gathered == _needs_whole(info, recipe(name)), info.name


def test_experts_tensors_and_stages_are_cut() -> None:
    one = plan_memory(TABLE, "adamw")
    by_expert = plan_memory(TABLE, "adamw", data=4, expert=4)
    assert by_expert.bytes_of("weight_bytes", "routed_expert") * 4 == one.bytes_of("weight_bytes", "routed_expert")
    assert by_expert.bytes_of("weight_bytes", "attention") == one.bytes_of("weight_bytes", "attention")
    both_ways = plan_memory(TABLE, "adamw", fsdp=4, expert=2)
    assert both_ways.bytes_of("weight_bytes", "routed_expert") * 4 == one.bytes_of("weight_bytes", "routed_expert")
    tensor = plan_memory(TABLE, "adamw", tensor=2)
    for role in ("attention", "routed_expert", "embedding", "head"):
        assert tensor.bytes_of("weight_bytes", role) * 2 == one.bytes_of("weight_bytes", role)
    assert tensor.bytes_of("weight_bytes", "router") == one.bytes_of("weight_bytes", "router")
    stage = plan_memory(TABLE, "adamw", pipeline=4)
    assert stage.bytes_of("weight_bytes", "routed_expert") * 4 == one.bytes_of("weight_bytes", "routed_expert")
    assert len([role for role in ("embedding", "head") if stage.bytes_of("weight_bytes", role)]) == 1
    assert any("of 4 pipeline stages" in note for note in stage.notes)


def test_a_list_of_experts_is_cut_by_expert() -> None:
    listed = [ParamInfo(f"{e}.up", "routed_expert", (24, 16), layer=0, expert=e, matrix_axes=(0, 1)) for e in range(8)]
    plan = plan_memory([*TABLE[:1], *listed], "adamw", data=4, expert=4)
    assert plan.bytes_of("weight_bytes", "routed_expert") == 2 * 24 * 16 * 4


def test_the_frame_holds_the_plan() -> None:
    plan = plan_memory(TABLE, "mesh")
    frame = plan.frame
    assert frame.schema == pl.Schema(SCHEMA)
    assert set(frame["recipe"]) == {"mesh"}
    state = frame.filter(pl.col("metric") == "state_bytes")
    assert state["value"].sum() == plan.state_bytes
    assert frame.filter(pl.col("metric") == "peak_bytes")["value"].to_list() == [plan.peak_bytes]
    assert frame.filter(pl.col("metric") == "parameters")["value"].to_list() == [WHOLE]
    assert set(frame.filter(pl.col("metric") != "parameters")["unit"]) == {"B"}
    text = "\n".join(plan.lines())
    assert f"{plan.state_bytes:,} B" in text
    assert json.loads(json.dumps(plan.to_dict()))["bytes"]["state_bytes"] == plan.state_bytes


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fsdp": 0}, "parallel degree fsdp is 0; allowed: an integer of at least 1"),
        ({"expert": 2}, "expert degree 2 does not divide data x fsdp = 1 x 1 = 1 ranks"),
        ({"fsdp": 6, "expert": 4, "data": 2}, "expert degree 4 and fsdp degree 6 do not fit into each other"),
        ({"data": 16, "expert": 16}, "expert degree 16 does not divide the 8 experts"),
        ({"pipeline": 5}, "pipeline degree 5 exceeds the 4 layers"),
        ({"weights": "int4"}, "precision weights is 'int4'; allowed: float64, float32, bfloat16, float16"),
        ({"batch": 0}, "batch is 0; allowed: an integer of at least 1"),
        ({"checkpointing": "some"}, "checkpointing is 'some'; allowed: none, selective, full"),
        ({"gpu": "A100"}, "plan_memory has no setting 'gpu'; allowed: accumulation, "),
    ],
)
def test_contradictions_are_one_clear_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(GradreelError) as error:
        plan_memory(TABLE, "adamw", **settings)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"model_type": "mixtrall"}, r"unknown family 'mixtrall' \(model_type\).*nearest being mixtral"),
        ({"hidden_size": 8}, "names no model_type"),
        ({"model_type": "mixtral", "hidden_size": "wide"}, "config of family mixtral: .*hidden_size"),
        ("nowhere/config.json", "cannot be read: No such file"),
        ("no-such-model", "unknown model 'no-such-model'"),
        ([], "a shape table holds nothing"),
        ([3], "a shape table holds int"),
        (7, "cannot plan for int; allowed: a module"),
    ],
)
def test_what_is_no_source_says_so(source: Any, words: str) -> None:
    with pytest.raises(GradreelError, match=words) as error:
        plan_memory(source, "adamw")
    assert "\n" not in str(error.value)


def test_expert_parallelism_needs_experts() -> None:
    dense = [p for p in TABLE if p.role not in ("routed_expert", "router")]
    plan = plan_memory(dense, "adamw", fsdp=2)
    assert plan.peak_bytes > 0
    assert plan.notes[-1] == "shape table has no routed experts: this is the plan of a dense model"
    assert not any("dense" in note for note in plan_memory(TABLE, "adamw").notes)
    with pytest.raises(GradreelError, match="expert degree is 2, but shape table has no routed experts; allowed: 1"):
        plan_memory(dense, "adamw", fsdp=2, expert=2)


def test_units_are_never_mixed() -> None:
    assert parse_bytes("40GB") == 40 * 10**9
    assert parse_bytes("40 GiB") == 40 * 2**30
    assert parse_bytes("1.5gib") == 3 * 2**29
    assert parse_gpus("8x80GB") == (8, 80 * 10**9)
    assert both(2**30) == "1.000 GiB (1.074 GB)"
    for text in ("40", "GB", "0GB", "40GX", "-1GB", "1e3GB"):
        with pytest.raises(GradreelError, match="is not understood; allowed"):
            parse_bytes(text)
    for text in ("8", "x80GB", "0x80GB", "8*80GB"):
        with pytest.raises(GradreelError, match="not understood; allowed"):
            parse_gpus(text)
