"""Replaying what trained the demo's model gives its recorded weights, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ablations.data.corpus import stdlib_corpus
from ablations.models import MoELanguageModel
from ablations.presets import PRESETS
from ablations.train import Schedule, train
from toolkit.optim import make_optimizer
from toolkit.replay import selfcheck
from traces.record_at import RecordAt
from traces.recorder import Recorder

STEPS = 12


def adamw(foreach: bool) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=foreach)


def skewadam(**options: bool) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: make_optimizer(model, "skewadam", lr=2e-3, **options)


@pytest.mark.parametrize(
    "make",
    [adamw(foreach=False), adamw(foreach=True), skewadam(), skewadam(paper_exact=True)],
    ids=["adamw-single-tensor", "adamw-foreach", "skewadam", "skewadam-paper-exact"],
)
def test_unthinned_trace_of_every_role_is_bit_exact(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    torch.manual_seed(0)
    model = MoELanguageModel(PRESETS.get("demo").model)
    optimizer, corpus = make(model), stdlib_corpus()
    with Recorder(tmp_path / "a.trace", model, optimizer, at=RecordAt(roles=("all",)), notify=lambda text: None):
        train(
            model,
            optimizer,
            lambda step, micro_step: corpus.batch(0, step, 2, 96, micro_step),
            STEPS,
            schedule=Schedule(STEPS, 3),
            clip=1.0,
        )
    check = selfcheck(tmp_path / "a.trace")
    assert (check.ok, check.comparable, check.max_difference) == (True, True, 0.0), check.message
    assert check.compared == len(list(model.parameters()))
