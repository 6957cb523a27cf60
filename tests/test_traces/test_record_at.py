"""RecordAt: what is recorded when, its checks, its size."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import GradreelError, RecordAt
from traces.record_at import format_bytes, parse_bytes
from traces.schema import LayerInfo
from traces.views import ParamInfo

PARAMS = [
    ParamInfo("up", "routed_expert", (8, 6, 4), layer=0, expert_axis=0, num_experts=8),
    ParamInfo("gate", "router", (8, 4), layer=0),
    ParamInfo("embed", "embedding", (100, 4)),
]
LAYERS = [LayerInfo(0, "experts", 8, 2)]


@given(st.integers(1, 9), st.integers(1, 60))
def test_count_every(every: int, steps: int) -> None:
    at = RecordAt(every=every)
    assert at.recorded_count(steps) == sum(map(at.records, range(1, steps + 1)))


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 60))
def test_count_bursts(length: int, pause: int, steps: int) -> None:
    at = RecordAt(bursts=(length, length + pause))
    assert at.recorded_count(steps) == sum(map(at.records, range(1, steps + 1)))


def test_bursts_are_neighbours_from_step_one() -> None:
    at = RecordAt(bursts=(3, 10))
    assert [s for s in range(25) if at.records(s)] == [1, 2, 3, 11, 12, 13, 21, 22, 23]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 1.5}, "every is 1.5"),
        ({"every": True}, "every is True"),
        ({"every": 10**30}, "every is 1000"),
        ({"bursts": (1, 10**30)}, "period <= 2^53"),
        ({"experts": 10**30}, "experts is 1000"),
        ({"roles": None}, "roles is None"),
        ({"streams": 5}, "streams is 5"),
        ({"bursts": (5, 4)}, "(length, period)"),
        ({"bursts": 5}, "(length, period)"),
        ({"bursts": (2, 4), "every": 2}, "give one of the two"),
        ({"roles": ()}, "roles is empty"),
        ({"roles": ("expert",)}, "unknown role 'expert'"),
        ({"streams": ("gradients",)}, "unknown stream 'gradients'"),
        ({"experts": "some"}, "'some'"),
        ({"experts": 0}, "experts is 0"),
        ({"experts": (1, 1)}, "different ids"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"budget": "ten"}, "'10GiB'"),
        ({"budget": "10 parsecs"}, "'10 parsecs'"),
        ({"budget": 0}, "at least one byte"),
        ({"budget": "9e99GiB"}, "is not a size"),
        ({"budget": "9999999999999TiB"}, "below 2^60"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(GradreelError) as error:
        RecordAt(**options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("10GiB", 10 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("7", 7),
        (7, 7),
        ("2kb", 2000),
        ("1tib", 1 << 40),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 10 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "10.0 GiB",
        "5.0 TiB",
    ]


def test_json_round_trip() -> None:
    at = RecordAt(bursts=(16, 500), roles="router", experts=[3, 1], dtype="bfloat16", budget=None)  # type: ignore[arg-type]
    assert at.experts == (1, 3)
    assert RecordAt.from_json(json.loads(json.dumps(at.to_json()))) == at
    with pytest.raises(GradreelError, match="unknown field 'often'"):
        RecordAt.from_json({"often": 3})


def test_roles() -> None:
    assert RecordAt().records_role("router_bias")
    assert not RecordAt().records_role("embedding")
    assert RecordAt(roles=("backbone",)).records_role("embedding")
    assert not RecordAt(roles=("backbone",)).records_role("routed_expert")
    assert RecordAt(roles=("all",)).records_role("norm")


def test_sampled_experts_span_the_load() -> None:
    load = [50, 10, 30, 20, 0, 40, 60, 70]
    chosen = RecordAt(experts=3).choose_experts(8, load)
    assert chosen is not None
    assert chosen.tolist() == [0, 4, 7] or chosen.tolist() == [4, 5, 7]
    assert {4, 7} <= set(chosen.tolist())
    assert RecordAt(experts=8).choose_experts(8, load) is None
    assert RecordAt().choose_experts(8) is None
    assert RecordAt(experts=1).choose_experts(8, load).tolist() == [7]  # type: ignore[union-attr]
    with pytest.raises(GradreelError, match="names id 9"):
        RecordAt(experts=(9,)).choose_experts(8)


@given(st.integers(1, 40), st.data())
def test_a_sample_is_increasing_and_of_the_size_asked(experts: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(1, experts))
    load = data.draw(st.lists(st.integers(0, 5), min_size=experts, max_size=experts))
    chosen = RecordAt(experts=wanted).choose_experts(experts, load)
    ids = np.arange(experts) if chosen is None else chosen
    assert len(ids) == wanted
    assert (np.diff(ids) > 0).all()


def test_estimate_counts_what_is_recorded() -> None:
    one = RecordAt().step_bytes(PARAMS, LAYERS, 100)
    assert one == (8 * 6 * 4 + 8 * 4) * 4 + 100 * 2 + 1024
    assert RecordAt(dtype="bfloat16").step_bytes(PARAMS, LAYERS, 0) == (8 * 6 * 4 + 8 * 4) * 2 + 1024
    assert RecordAt(experts=2).step_bytes(PARAMS, LAYERS, 0) == (2 * 6 * 4 + 8 * 4) * 4 + 1024
    assert RecordAt(every=10).estimate(PARAMS, LAYERS, 100, 100) < RecordAt().estimate(PARAMS, LAYERS, 100, 100) / 5


def test_a_budget_too_small_for_one_step_says_what_to_do() -> None:
    RecordAt(budget="1MiB").check_budget(PARAMS, LAYERS, 100)
    with pytest.raises(GradreelError, match="too small: one step and its weight snapshots need"):
        RecordAt(budget="1KiB").check_budget(PARAMS, LAYERS, 100)
