"""Recordings that a careless or unlucky user makes: strange scalars, names, selections; nothing else is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from traces.errors import GradreelError, NotRecorded
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder

WIDTH, EXPERTS = 4, 3
UP = "moe.experts.up"


class Experts(nn.Module):
    def __init__(self, up: str = "up") -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.register_parameter(up, nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH)))

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        stack = next(self.parameters())
        return (torch.einsum("tkfd,td->tkf", stack[ids], tokens) * weights[..., None]).sum(1)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(tokens, self.weight)
        weights, ids = logits.softmax(-1).topk(2, dim=-1)
        return logits, weights, ids


class Moe(nn.Module):
    def __init__(self, up: str = "up") -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts(up)

    def forward(self, tokens: Tensor) -> Tensor:
        _, weights, ids = self.router(tokens)
        return self.experts(tokens, ids, weights)


class Small(nn.Module):
    def __init__(self, up: str = "up") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = Moe(up)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.moe(tokens)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, between: Callable[[], Any] = int) -> None:
    for _ in range(steps):
        model(torch.randn(6, WIDTH)).square().mean().backward()
        between()
        optimizer.step()
        optimizer.zero_grad()


def pair(up: str = "up") -> tuple[Small, torch.optim.Optimizer]:
    model = Small(up)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


STRANGE: dict[str, Any] = {
    "object": object(),
    "set": {1},
    "bytes": b"x",
    "complex": 1 + 1j,
    "complex tensor": torch.tensor(1 + 1j),
    "huge integer": 1 << 63,
    "long text": "x" * 70_000,
    "half a character": "\ud800",
    "deep": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]],
    "large tensor": torch.zeros(100_000),
    "large array": np.zeros(100_000),
    "long list": [0.5] * 100_000,
    "list of objects": [object()],
    "reserved": {"nonfinite": "nan"},
    "keys": {1: 2},
}


@pytest.mark.parametrize("what", sorted(STRANGE))
def test_a_scalar_that_no_trace_can_hold_costs_itself_only(tmp_path: Path, what: str) -> None:
    notes: list[str] = []
    model, optimizer = pair()
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append) as reel:
        train(model, optimizer, between=lambda: reel.log(loss=1.5, odd=STRANGE[what]))
    trace = open_trace(tmp_path / "a")
    assert trace.steps == [1, 2]
    assert trace.lost_steps == 0
    assert trace.gradient(UP, 2) is not None
    assert trace.scalars()["loss"].to_list()[:2] == [1.5, 1.5]
    assert "odd" not in trace.scalars().columns
    told = [note for note in notes if "'odd'" in note]
    assert len(told) == 1
    assert len(told[0]) < 300
    assert "\n" not in told[0]


@pytest.mark.parametrize("name", ["x" * 600, "\ud800"])
def test_a_scalar_with_a_name_that_no_trace_can_hold(tmp_path: Path, name: str) -> None:
    notes: list[str] = []
    model, optimizer = pair()
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append) as reel:
        train(model, optimizer, between=lambda: reel.log(**{name: 1, "loss": 2}))
    assert open_trace(tmp_path / "a").steps == [1, 2]
    assert sum("left out" in note for note in notes) == 1


@pytest.mark.parametrize(
    "value", [float("nan"), None, True, "text", [1, 2.5], {"a": 1}, torch.tensor(2.0), np.float32(3)]
)
def test_ordinary_scalars_are_kept_without_a_word(tmp_path: Path, value: Any) -> None:
    notes: list[str] = []
    model, optimizer = pair()
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append) as reel:
        train(model, optimizer, between=lambda: reel.log(odd=value))
    assert "odd" in open_trace(tmp_path / "a").scalars().columns
    assert not [note for note in notes if "left out" in note]


@pytest.mark.parametrize("up", ["x" * 600, "new\nline"])
def test_a_parameter_name_that_no_trace_can_hold_is_told_before_training(tmp_path: Path, up: str) -> None:
    model, optimizer = pair(up)
    with pytest.raises(GradreelError, match="name") as error:
        Recorder(tmp_path / "a", model, optimizer)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "a").exists()


def test_provenance_that_no_trace_can_hold_is_told_before_training(tmp_path: Path) -> None:
    model, optimizer = pair()
    with pytest.raises(GradreelError, match=r"provenance\.who is a object"):
        Recorder(tmp_path / "a", model, optimizer, provenance={"who": object()})


def test_expert_ids_that_a_layer_lacks_are_told_before_training(tmp_path: Path) -> None:
    model, optimizer = pair()
    with pytest.raises(GradreelError, match="experts names id 9, the layer has experts 0 to 2"):
        Recorder(tmp_path / "a", model, optimizer, RecordAt(experts=[0, 9]))


def test_a_recorder_that_is_over_does_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    notes: list[str] = []
    model, optimizer = pair()
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append) as reel:
        train(model, optimizer)
    told = list(notes)
    reel.log(loss=1)
    reel.mask(torch.ones(6))
    reel.flush()
    train(model, optimizer)
    reel.__exit__(None, None, None)
    assert notes == told
    assert open_trace(tmp_path / "a").steps == [1, 2]


@pytest.mark.parametrize("nested", [True, False])
def test_a_recorder_is_entered_once(tmp_path: Path, nested: bool) -> None:
    model, optimizer = pair()
    reel = Recorder(tmp_path / "a", model, optimizer, notify=str)
    with reel:
        train(model, optimizer)
        if nested:
            with pytest.raises(GradreelError, match="was entered before"):
                reel.__enter__()
            train(model, optimizer)
    with pytest.raises(GradreelError, match="was entered before"):
        reel.__enter__()
    assert open_trace(tmp_path / "a").steps == ([1, 2, 3, 4] if nested else [1, 2])


def test_two_recordings_of_one_model_into_one_folder(tmp_path: Path) -> None:
    """The second is told while it runs that the folder is taken; the first is whole."""
    first: list[str] = []
    second: list[str] = []
    model, optimizer = pair()
    with Recorder(tmp_path / "a", model, optimizer, notify=first.append) as one:  # noqa: SIM117
        with Recorder(tmp_path / "a", model, optimizer, notify=second.append) as two:
            train(model, optimizer, steps=1)
            one.flush()
            two.flush()
            train(model, optimizer, steps=2)
            one_of_both = [*first, *second]
            assert sum("already holds a trace" in note for note in one_of_both) == 1
    assert open_trace(tmp_path / "a").steps == [1, 2, 3]


class Listed(nn.Module):
    """A list of experts, of which only the chosen ones run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = Router()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, tokens: Tensor) -> Tensor:
        _, weights, ids = self.router(tokens)
        every = torch.stack([expert(tokens) for expert in self.experts], dim=1)
        return (every.gather(1, ids[..., None].expand(-1, -1, WIDTH)) * weights[..., None]).sum(1)


def test_chosen_experts_of_a_list(tmp_path: Path) -> None:
    model = Listed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(tmp_path / "a", model, optimizer, RecordAt(experts=[0, 2]), notify=str):
        train(model, optimizer)
    trace = open_trace(tmp_path / "a")
    assert trace.verify() == []
    assert trace.gradient("experts.2.weight", 1) is not None
    with pytest.raises(NotRecorded, match=r"experts\.1\.weight"):
        trace.gradient("experts.1.weight", 1)
    with pytest.raises(GradreelError, match="experts names id 3, the layer has experts 0 to 2"):
        Recorder(tmp_path / "b", model, optimizer, RecordAt(experts=[3]))


def test_a_mask_that_stops_fitting_is_told(tmp_path: Path) -> None:
    notes: list[str] = []
    model, optimizer = pair()
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append) as reel:
        for size in (6, 6, 5):
            reel.mask(torch.ones(size))
            train(model, optimizer, steps=1)
        with pytest.raises(GradreelError, match="mask is a str"):
            reel.mask("text")  # type: ignore[arg-type]
    assert sum("did not fit the routed tokens in 1 steps, first in step 3" in note for note in notes) == 1


def test_a_script_that_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    model, optimizer = pair()
    with Recorder("a.trace", model, optimizer, notify=str):
        monkeypatch.chdir(tmp_path / "below")
        train(model, optimizer)
    assert open_trace(tmp_path / "a.trace").steps == [1, 2]
    assert list((tmp_path / "below").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((5, "model"), {}, "path 5 is no path"),
        (("a\0b", "model"), {}, "is no path"),
        (("x" * 300, "model"), {}, "cannot be used: File name too long"),
        (("a", "optimizer", "model"), {}, "model is a SGD, not a torch.nn.Module"),
        (("a", "model"), {"at": 5}, "at is a int, not a RecordAt"),
        (("a", "model"), {"roles": 5}, "roles is a int"),
        (("a", "model"), {"when_full": "wait"}, "when_full 'wait' is not allowed"),
        (("a", "model"), {"queue_steps": 0}, "queue_steps 0 is not allowed"),
        (("a", "model"), {"queue_steps": 1.5}, "queue_steps 1.5 is not allowed"),
        (("a", "model"), {"layout": {"experts": "*.experts", "num_experts": 7}}, "num_experts is 7, module"),
    ],
)
def test_arguments_that_cannot_be_are_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, options: Any, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = pair()
    named = {"model": model, "optimizer": optimizer}
    with pytest.raises(GradreelError) as error:
        Recorder(*(named.get(each, each) for each in arguments), **options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
