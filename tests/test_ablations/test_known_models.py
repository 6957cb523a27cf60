"""Models known by name: their parameter counts are the public ones, and the study's plan is the published one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import ablations.models.known as known
from ablations.models import MoEConfig, MoELanguageModel
from ablations.models.expert_list import list_experts
from toolkit.memory import account_slots, architecture, build_on_meta, plan_memory, shape_table
from toolkit.variants import recipe
from traces.errors import GradreelError
from traces.views import ParamInfo

STUDY, WHALE = "skewadam-6.78b", "nanowhale-110m"
#: Exact where a hub shows the number of elements of a model's weight files (without buffers such as biases of routing).
EXACT = {
    STUDY: 6_784_327_680,
    WHALE: 110_369_589,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # the router's bias is a buffer
}


@pytest.mark.parametrize("name", known.KNOWN.names())
def test_parameters_are_as_many_as_published(name: str) -> None:
    model = known.KNOWN.get(name)
    number, unit = re.fullmatch(r"([0-9.]+)([MBT])", model.parameters).groups()
    size = {"M": 10**6, "B": 10**9, "T": 10**12}[unit]
    half_a_digit = 0.5 * 10.0 ** -len(number.partition(".")[2])
    counted = architecture(name).parameters
    assert abs(counted / size - float(number)) <= half_a_digit
    assert counted == EXACT.get(name, counted)
    assert model.source


def test_the_study_is_the_config_that_is_trained() -> None:
    values = dict(known.KNOWN.get(STUDY).config)
    assert values.pop("model_type") == known.MODEL_TYPE
    assert values.pop("expert_weights") == "list"
    study = MoEConfig.skewadam_study().to_dict()
    assert values == {key: study[key] for key in values}
    assert MoEConfig(**{**values, "moe_layers": tuple(values["moe_layers"])}) == MoEConfig.skewadam_study()


SMALL = MoEConfig(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=16,
    dense_hidden=16, expert_hidden=12, num_experts=4, top_k=2, moe_layers=(1,),
)  # fmt: skip


def test_a_list_of_experts_computes_what_the_stack_does() -> None:
    torch.manual_seed(0)
    stacked = MoELanguageModel(SMALL)
    torch.manual_seed(0)
    listed = list_experts(MoELanguageModel(SMALL))
    tokens = torch.randint(0, 32, (2, 8))
    assert torch.allclose(stacked(tokens).logits, listed(tokens).logits, atol=1e-6)
    assert sum(p.numel() for p in stacked.parameters()) == sum(p.numel() for p in listed.parameters())
    experts = [info for info in shape_table(listed) if info.role == "routed_expert"]
    assert len(experts) == 3 * 4
    assert {info.expert for info in experts} == {0, 1, 2, 3}


def test_a_config_of_ours_says_what_is_wrong() -> None:
    for values, words in (
        ({"hidden": 3}, "unknown MoEConfig field 'hidden'"),
        ({"vocab_size": 3}, "config of model_type gradreel"),
        ({**SMALL.to_dict(), "expert_weights": "piled"}, "expert_weights is 'piled'; allowed: stacked, list"),
    ):
        with pytest.raises(GradreelError, match=words):
            build_on_meta({"model_type": known.MODEL_TYPE, **values})


@pytest.mark.parametrize(
    ("name", "state_bytes"),
    [
        ("adamw", 54_274_621_440),
        ("lion", 27_137_310_720),
        ("skewadam", 1_380_800_000),
        ("skewadam(tiers=expert_momentum)", 27_150_603_776),
        ("skewadam(tiers=factored_router)", 1_378_719_744),
        ("skewadam(tiers=uniform)", 27_150_620_672),
        ("adafactor", 13_309_952),
        ("muon(compat=study)", 27_967_946_752),
        ("galore(rank=128, refresh=0, side=both)", 1_735_196_672),
    ],
)
def test_state_of_the_study(name: str, state_bytes: int) -> None:
    plan = plan_memory(STUDY, name)
    assert plan.state_bytes == state_bytes
    assert plan.pinned_gradient_bytes == 0
    assert plan.bytes_of("weight_bytes") == 13_569_785_856
    counters = plan.bytes_of("step_counter_bytes")
    assert counters % 8 == 0  # int64, a line of their own
    assert sum(row for (category, _), row in plan.rows.items() if category == "state_bytes") == state_bytes


def test_tiers_of_skewadam_in_the_study() -> None:
    slots = account_slots(recipe("skewadam"), shape_table(STUDY))
    backbone = [key for key in slots if key[0] not in ("router", "routed_expert")]
    assert sum(slots[key] for key in backbone if key[1] == "momentum") == 1_365_409_792
    assert sum(slots[key] for key in backbone if key[1] != "momentum") == 710_144
    assert slots["routed_expert", "row_moment"] + slots["routed_expert", "column_moment"] == 12_582_912
    assert slots["router", "second_moment"] == 2_097_152
    assert set(slots) == {*backbone, *[k for k in slots if k[0] in ("router", "routed_expert")]}
    assert ("routed_expert", "momentum") not in slots


def test_state_of_nanowhale() -> None:
    table = shape_table(WHALE)
    assert plan_memory(table, "adamw").state_bytes == 8 * 110_369_589
    # The original's router bias is a parameter: 4 experts in each of 8 layers.
    biases = [ParamInfo(f"layers.{layer}.bias", "router_bias", (4,), layer=layer) for layer in range(8)]
    assert plan_memory([*table, *biases], "adamw").state_bytes == 882_956_968
    mesh = plan_memory(WHALE, "mesh")
    assert mesh.state_bytes == 330_959_360
    assert mesh.pinned_gradient_bytes == 4 * 19_660_800 == mesh.bytes_of("pinned_gradient_bytes", "routed_expert")


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("skewadam(paper_exact=True)", 31.328065395355225),
        ("adamw", 81.35644721984863),
        ("muon(compat=study)", 57.62402534484863),
        ("galore(rank=128, refresh=0, side=both)", 31.658082962036133),
    ],
)
def test_peaks_that_the_study_logged(name: str, gib: float) -> None:
    """The closed form, without what CUDA itself takes (64 MiB and more), against a logged peak."""
    run = {"batch": 8, "sequence": 128, "micro_steps": 8}
    original = plan_memory(STUDY, name, step="original", **run)
    assert original.peak_phase == "optimizer step"
    assert original.peak_bytes / 2**30 == pytest.approx(gib, rel=0.005)
    assert plan_memory(STUDY, name, **run).peak_bytes < original.peak_bytes


def test_one_layer_more_is_one_layer_more() -> None:
    """The shape table of a deep model is what its layers add up to, so none is counted twice or left out."""
    config = {**known.KNOWN.get("deepseek-v3").config, "num_hidden_layers": 4, "vocab_size": 512}
    deep, deeper = architecture(config), architecture({**config, "num_hidden_layers": 5})
    added = [replace(p, name="", layer=None) for p in deeper.params if p.layer == 4]
    last = [replace(p, name="", layer=None) for p in deep.params if p.layer == 3]
    assert added == last
    assert deeper.parameters - deep.parameters == sum(p.numel for p in last)
