"""Parts of tensors: every element once, overlaps and gaps told, against an index array as the slow truth."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import pytest

from traces import TraceError
from traces.placements import FLAT, Placement, assembled, placement_from_json, runs_of, uncovered


def cut(whole: np.ndarray, part: Placement) -> np.ndarray:
    """The part by plain indexing."""
    if part.is_flat:
        return whole.reshape(-1)[part.indices(FLAT)]
    for axis in part.runs:
        whole = np.take(whole, part.indices(axis), axis=axis)
    return whole


def random_parts(rng: np.random.Generator, shape: tuple[int, ...]) -> list[Placement]:
    """A grid of ranks over some axes; each axis is dealt out in a random order, some ranks get nothing."""
    axes = [axis for axis in range(len(shape)) if rng.random() < 0.6] or [0]
    deals = []
    for axis in axes:
        owners = rng.integers(0, 3, shape[axis])
        deals.append([rng.permutation(np.flatnonzero(owners == owner)).tolist() for owner in range(3)])
    return [Placement.of(dict(zip(axes, indices, strict=True))) for indices in product(*deals)]


def test_parts_are_put_together_as_they_were_cut() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(1, 4)))
        whole = rng.standard_normal(shape)
        parts = random_parts(rng, shape)
        assert uncovered(shape, list(enumerate(parts)), "w") is None
        for part in parts:
            assert part.shape(shape) == cut(whole, part).shape
            again = placement_from_json(json.loads(json.dumps(part.to_json())), shape, "w")
            assert again.key == part.key
        pieces = [(part, lambda part=part, whole=whole: cut(whole, part)) for part in parts]
        np.testing.assert_array_equal(assembled(shape, pieces, whole.dtype), whole)
        lost = rng.integers(len(parts))
        rest = [(rank, part) for rank, part in enumerate(parts) if rank != lost]
        if cut(whole, parts[lost]).size:
            assert uncovered(shape, rest, "w") is not None
            with pytest.raises(TraceError, match=rf"w: ranks \d+ and {len(parts)} hold the same part"):
                uncovered(shape, [*enumerate(parts), (len(parts), parts[lost])], "w")
        else:
            assert uncovered(shape, rest, "w") is None


def test_a_flat_stretch() -> None:
    whole = np.arange(12.0).reshape(3, 4)
    parts = [Placement({FLAT: ((0, 5),)}), Placement({FLAT: ((10, 2), (5, 5))})]
    assert uncovered((3, 4), list(enumerate(parts)), "w") is None
    pieces = [(part, lambda part=part, whole=whole: cut(whole, part)) for part in parts]
    np.testing.assert_array_equal(assembled((3, 4), pieces, whole.dtype), whole)
    assert uncovered((3, 4), [(0, parts[0])], "w") == "element 5 to 11"
    with pytest.raises(TraceError, match="some ranks hold it as a stretch"):
        uncovered((3, 4), [(0, parts[0]), (1, Placement({0: ((0, 1),)}))], "w")


def test_gaps_are_named_by_axis() -> None:
    assert uncovered((4, 6), [(0, Placement({0: ((0, 2),)}))], "w") == "axis 0, index 2 to 3"
    assert uncovered((4,), [], "w") == "all of it"
    assert runs_of([0, 1, 2, 7, 8, 3]) == ((0, 3), (7, 2), (3, 1))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "must map axes"),
        ([[0, 1]], "must map axes"),
        ({"2": [[0, 1]]}, "no axis of shape"),
        ({"-1": [[0, 1]]}, "no axis of shape"),
        ({"0": [[0, 5]]}, "from 0 to 4"),
        ({"0": [[5, 0]]}, "from 0 to 4"),
        ({"0": [[0, 2], [1, 1]]}, "index 1 is listed twice"),
        ({"0": [[0, -1]]}, "from 0 to 4"),
        ({"0": [[0, True]]}, "integer"),
        ({"0": [[0]]}, r"must be \[first, count\]"),
        ({"0": 3}, "must list"),
        ({"0": [[0, 0]] * 70000}, "at most 65536 runs"),
        ({"flat": [[0, 25]]}, "from 0 to 24"),
        ({"flat": [[0, 2]], "0": [[0, 1]]}, "names no axes"),
    ],
)
def test_what_cannot_be_is_refused(value: Any, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        placement_from_json(value, (4, 6), "w")


def test_declared_sizes_cost_nothing() -> None:
    """A shape of 2^50 elements in two parts is checked without an array of its size."""
    huge = 1 << 50
    halves = [(0, Placement({0: ((0, huge // 2),)})), (1, Placement({0: ((huge // 2, huge // 2),)}))]
    assert uncovered((huge, 2), halves, "w") is None
    scattered = Placement({0: tuple((2 * i, 1) for i in range(40000)), 1: tuple((2 * i, 1) for i in range(40000))})
    with pytest.raises(TraceError, match="more than 1048576 pieces"):
        uncovered((huge, huge), [(0, scattered)], "w")
