"""`print(optimizer)` shows which chain serves what, and counts everything once."""

from __future__ import annotations

from torch import nn

from ablations.models import MoELanguageModel
from ablations.presets import PRESETS
from toolkit.optim import RecipeOptimizer, make_optimizer


def demo_model() -> nn.Module:
    return MoELanguageModel(PRESETS.get("demo").model)


def test_every_parameter_is_in_exactly_one_line() -> None:
    model = demo_model()
    title, head, *lines = repr(make_optimizer(model, "mesh", lr=2e-3)).splitlines()
    assert title.startswith("optimizer mesh")
    assert head.split() == ["role", "params", "elements", "lr", "chain"]
    cells = [line.split() for line in lines]
    assert sum(int(row[1]) for row in cells) == len(list(model.parameters()))
    assert sum(int(row[2].replace(",", "")) for row in cells) == sum(p.numel() for p in model.parameters())
    (experts,) = (line for line in lines if line.startswith("routed_expert"))
    assert experts.split(maxsplit=4)[3:] == ["0.002", "hidden_ema > sr_sinkhorn > apply"]
    (embedding,) = (line for line in lines if line.startswith("embedding"))
    assert "0.002 x 2  sage > apply" in embedding
    assert max(map(len, lines)) <= 100


def test_a_group_of_its_own_shows_its_rate() -> None:
    weight = nn.Parameter(demo_model().embedding.weight.detach().clone())
    optimizer = RecipeOptimizer([{"params": [weight], "role": "attention", "lr": 0.5}], "adamw")
    assert repr(optimizer).splitlines()[2].split()[:4] == ["attention", "1", "32,768", "0.5"]
