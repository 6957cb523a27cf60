"""An optimizer that takes another's place, and bursts that are checked one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder

DOWN = "layers.1.experts.down_proj"


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_an_optimizer_that_takes_over_is_named_and_followed(
    tmp_path: Path, make_model, batches, parts, notes, given: bool
) -> None:
    model = make_model()
    first = torch.optim.AdamW(model.parameters(), lr=0.01)
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with Recorder(tmp_path / "a", model, first if given else None, notify=notes.append):
        for number, batch in enumerate(batches[:5]):
            parts.loss(model, batch).backward()
            seen.append(model.layers[1].experts.down_proj.grad.clone())
            (first if number < 2 else second).step()
            model.zero_grad()
    trace = open_trace(tmp_path / "a")
    assert trace.steps == [1, 2, 3, 4, 5]
    assert all(torch.equal(trace.gradient(DOWN, step), seen[step - 1]) for step in trace.steps)
    (note,) = [note for note in notes if "took the place" in note]
    assert note.startswith("before step 3 SGD took the place of AdamW")
    assert trace.scalars()["optimizer"].to_list()[:5] == [None, None, "SGD", None, None]

    from toolkit.replay import selfcheck

    check = selfcheck(trace, progress=False)
    assert not check.ok
    assert not check.comparable
    assert "SGD took over at step 3" in check.message


def test_an_optimizer_inside_another_is_a_part_of_it(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """As sharpness-aware minimisation and ZeRO wrap theirs."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            inner.step()

    outer = Outer(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, outer, notify=notes.append):
        for batch in batches[:3]:
            parts.loss(model, batch).backward()
            outer.step()
            outer.zero_grad()
    assert open_trace(tmp_path / "a").steps == [1, 2, 3]
    assert not any("took the place" in note for note in notes)


@pytest.mark.parametrize(("momentum", "experts"), [(0.0, "all"), (0.0, 2), (0.9, "all")])
def test_bursts_are_checked_each_from_its_own_weights(
    tmp_path: Path, make_model, batches, parts, notes, momentum: float, experts: Any
) -> None:
    from toolkit.replay import selfcheck

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    at = RecordAt(bursts=(2, 4), weights="bursts", experts=experts, resample=experts != "all")
    with Recorder(tmp_path / "a", model, optimizer, at, notify=notes.append):
        for batch in batches:
            parts.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = open_trace(tmp_path / "a")
    assert trace.weight_steps(DOWN) == [1, 3, 5, 7, 9]
    check = selfcheck(trace, progress=False)
    assert check.ok, check.message
    stateless = momentum == 0.0
    assert check.compared == (6 if stateless else 3)  # three parameters after each burst
    assert "2 bursts, each from its own weights" in check.message
    assert ("later bursts are not compared for" in check.message) != stateless
