"""A tracked training step is the real one: the same bytes as real tensors, and shortened without loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ablations.models import MoELanguageModel
from ablations.presets import PRESETS
from toolkit.memory import plan_memory, tracked_peak
from toolkit.optim import make_optimizer
from traces.errors import GradreelError

PRESET: Any = PRESETS.get("demo")
CONFIG = dataclasses.replace(PRESET.model, num_layers=2, moe_layers=(1,))
SIZE = {"batch": 2, "sequence": 64}


def build() -> MoELanguageModel:
    return MoELanguageModel(CONFIG)


@pytest.mark.parametrize("name", ["skewadam", "mesh", "adamw"])
def test_the_shortened_step_peaks_where_the_optimizer_itself_does(name: str) -> None:
    ours = tracked_peak(build, name, **SIZE)
    real = tracked_peak(
        build,
        optimizer=lambda model: make_optimizer(model, name, hidden_momentum="attached" if name == "mesh" else "auto"),
        **SIZE,
    )
    for phase in ("forward", "backward", "step"):
        assert ours.of_phase(phase).bytes == pytest.approx(real.of_phase(phase).bytes, rel=0.005), phase


@pytest.mark.parametrize("name", ["skewadam", "mesh", "sgd"])
def test_what_is_alive_is_what_is_planned(name: str) -> None:
    model = build()
    tracked = tracked_peak(model, name, **SIZE)
    plan = plan_memory(model, name, **SIZE)
    last = dict(next(p for p in reversed(tracked.phases) if p.phase == "step").alive)
    for category in ("weight_bytes", "gradient_bytes", "state_bytes", "pinned_gradient_bytes", "step_counter_bytes"):
        assert last.get(category, 0) == plan.bytes_of(category), category
    assert not any(hasattr(p, "fake_mode") for p in model.parameters())  # the model itself was not touched


def test_where_and_what_is_said() -> None:
    tracked = tracked_peak(build, "adamw", micro_steps=2, **SIZE)
    assert tracked.bytes == sum(size for _, size in tracked.alive) == tracked.peak.bytes
    assert tracked.rounded_bytes >= tracked.bytes
    assert tracked.rounded_bytes % 512 == 0
    assert tracked.peak.phase in tracked.where
    assert "GiB" in tracked.lines()[0]
    assert "GB" in tracked.lines()[0]
    assert [p.phase for p in tracked.phases[1:]] == ["forward", "backward", "step"] * 2


def test_torchs_optimizer_tracks_its_own_temporaries() -> None:
    def temporaries(foreach: bool) -> int:
        tracked = tracked_peak(
            build, optimizer=lambda model: torch.optim.AdamW(model.parameters(), foreach=foreach), **SIZE
        )
        second = next(p for p in reversed(tracked.phases) if p.phase == "step")  # state is there by then
        assert dict(second.alive)["state_bytes"] == 2 * weights
        return dict(second.alive)["temporary_bytes"]

    weights = sum(p.nbytes for p in build().parameters())
    assert temporaries(foreach=False) < weights <= temporaries(foreach=True)  # it takes all roots at once


def test_wrong_use_is_one_line() -> None:
    with pytest.raises(GradreelError, match="allowed under tracking: none, full"):
        tracked_peak(build, "adamw", checkpointing="selective")
    with pytest.raises(GradreelError, match="give one of them"):
        tracked_peak(build, "adamw", optimizer=lambda model: None)
    with pytest.raises(GradreelError, match="allowed: ours, original"):
        tracked_peak(build, "adamw", step="theirs")
    with pytest.raises(GradreelError, match="without a loss"):
        tracked_peak(build, "adamw", make_batch=lambda: {"input_ids": torch.zeros(1, 8, dtype=torch.int64)})
