"""selfcheck: bit-exact on honest traces, and on broken ones it names what differs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from toolkit.replay import selfcheck
from toolkit.replay._selfcheck import due_weights, recorded_threads
from toolkit.replay._source import Source
from traces.console import CheckFailed
from traces.errors import GradreelError


def adamw(**options):
    return lambda params: torch.optim.AdamW(list(params.values()), lr=1e-2, **options)


def sgd(**options):
    return lambda params: torch.optim.SGD(list(params.values()), lr=1e-2, **options)


def two_groups(params):
    names = list(params)
    first, rest = (
        {"params": [params[n] for n in names[:2]], "weight_decay": 0.0},
        {"params": [params[n] for n in names[2:]]},
    )
    return torch.optim.AdamW([first, rest], lr=1e-2, weight_decay=0.3, betas=(0.8, 0.95), foreach=True)


@pytest.mark.parametrize(
    "make",
    [
        adamw(foreach=False),
        adamw(foreach=True),
        adamw(foreach=True, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.2),
        two_groups,
        sgd(),
        sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
    ],
)
def test_bit_exact(tiny_run, make):
    run = tiny_run(make=make)
    for recipe in (None, "adamw" if make is two_groups else None):
        check = selfcheck(run.path, recipe)
        assert check.ok, check.message
        assert check.comparable
        assert check.compared == 5
        assert check.max_difference == 0.0
    check.require()


def test_bit_exact_over_skipped_steps_and_missing_gradients(tiny_run):
    run = tiny_run(
        skip=lambda step: step == 4, hide=lambda step, name, g: None if name == "attn.weight" and step % 3 == 0 else g
    )
    assert selfcheck(run.path).ok


def test_every_recorded_weight_is_compared(tiny_run):
    assert selfcheck(tiny_run(every_weight=True).path).compared == 12 * 5


def falsify(path, stream, name, step, change):
    """Rewrite the trace with one tensor changed, soundly sealed."""
    from traces.reader import open_trace
    from traces.schema import StepRecord
    from traces.writer import TraceWriter

    trace = open_trace(path)
    other = path.with_name("false.trace")
    writer = TraceWriter(other, trace.header)
    for s in trace.all_steps:
        sealed = trace._ranks[0].step(s)
        record = StepRecord(s, recorded=sealed.recorded, skipped=sealed.skipped, scalars=sealed.scalars)
        for info in trace.header.params:
            if sealed.recorded:
                record.presence[info.name] = trace.presence(info.name, s)
            for kind in ("gradient", "weight"):
                raw = trace.raw(kind, info.name, s)
                if raw is None:
                    continue
                if (kind, info.name, s) == (stream, name, step):
                    raw = dataclasses.replace(raw, data=change(raw.data.copy()))
                record.tensors[kind, info.name] = raw
        writer.append(record)
    writer.close()
    return other


def nudge(data):
    """The smallest possible change of one element."""
    data.reshape(-1).view("i4")[3] += 1
    return data


@pytest.mark.parametrize(("stream", "step", "expected"), [("weight", 13, 13), ("weight", 6, 6), ("gradient", 6, 7)])
def test_one_changed_bit_names_step_and_tensor(tiny_run, stream, step, expected):
    def change(data):
        return nudge(data) if stream == "weight" else data * 1.5

    run = tiny_run(every_weight=True)
    check = selfcheck(falsify(run.path, stream, "experts.up", step, change))
    assert not check.ok
    assert check.comparable
    assert (check.step, check.param) == (expected, "experts.up")
    assert f"first in experts.up, weight before step {expected}" in check.message
    assert check.max_difference > 0
    with pytest.raises(CheckFailed, match=r"experts\.up"):
        check.require()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch_in_half_precision_is_not_comparable(tiny_run, tiny_table, dtype):
    table = tuple(dataclasses.replace(info, dtype=dtype) for info in tiny_table)
    check = selfcheck(tiny_run(table=table).path)
    assert (check.ok, check.comparable) == (False, False)
    assert f"compute and keep state in {dtype}" in check.message


def test_a_run_that_went_to_nan_is_reproduced_too(tiny_run):
    def poison(step, name, gradient):
        return gradient * torch.nan if step == 5 and name == "experts.up" else gradient

    run = tiny_run(hide=poison)
    assert run.weights[13]["experts.up"].isnan().all()
    assert selfcheck(run.path).ok
    healthy = selfcheck(falsify(run.path, "weight", "experts.up", 13, lambda data: np.ones_like(data)))
    assert (healthy.ok, healthy.param, healthy.max_difference) == (False, "experts.up", float("inf"))


def test_with_weights_at_the_ends_only_the_tensor_is_named(tiny_run):
    check = selfcheck(falsify(tiny_run().path, "gradient", "router.weight", 6, lambda data: data * 1.5))
    assert (check.ok, check.step, check.param) == (False, 13, "router.weight")


@pytest.mark.parametrize("recipe", ["adamw(weight_decay=0.02)", "sgd", "adamw(betas=(0.9, 0.99))"])
def test_another_recipe_than_the_one_that_trained_differs(plain_run, recipe):
    check = selfcheck(plain_run.path, recipe)
    assert not check.ok
    assert check.comparable
    assert check.param == "attn.weight"


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({"device": "cuda:0"}, "the run was on cuda:0"),
        ({"torch": "2.0.0"}, "torch was 2.0.0"),
        ({"fused": True}, "fused=True"),
        ({"machine": "vax"}, "machine was vax"),
        ({"cpu_capability": "AVX1024"}, "cpu_capability was AVX1024"),
    ],
)
def test_other_machines_are_not_comparable(tiny_run, run, reason):
    path = tiny_run(run=run).path
    false = falsify(path, "weight", "norm.weight", 13, lambda data: data + 0.5)
    check = selfcheck(false)
    assert not check.ok
    assert not check.comparable
    assert reason in check.message
    assert "not comparable bit for bit" in check.message
    assert "largest difference 0.5 in norm.weight" in check.message
    assert check.max_difference == pytest.approx(0.5)
    check.require()
    assert selfcheck(path).ok


def test_thinned_traces_are_not_comparable(tiny_run):
    check = selfcheck(tiny_run(keep=lambda step: step != 4).path)
    assert (check.ok, check.comparable) == (False, False)
    assert "gap" in check.message
    check = selfcheck(tiny_run(with_weights=False).path)
    assert (check.ok, check.comparable) == (False, False)
    assert "no weight" in check.message


def test_a_gap_after_a_recorded_weight_leaves_the_part_before_it(tiny_run):
    run = tiny_run(keep=lambda step: step != 8, every_weight=True)
    assert max(due_weights(Source.of(run.path)).steps) == 6
    check = selfcheck(run.path)
    assert check.ok
    assert check.compared == 6 * 5


def test_unknown_optimizers_are_refused_with_advice(tiny_run):
    run = tiny_run(make=lambda params: torch.optim.Adagrad(list(params.values()), lr=1e-2))
    with pytest.raises(GradreelError, match="trained by Adagrad"):
        selfcheck(run.path)


def test_the_recorded_number_of_threads_is_used_and_put_back(tiny_run):
    before = torch.get_num_threads()
    check = selfcheck(tiny_run(run={"threads": before + 1}).path)
    assert torch.get_num_threads() == before
    assert check.ok
    assert check.comparable
    seen = []
    with recorded_threads(Source.of(tiny_run(run={"threads": before + 1}).path)):
        seen.append(torch.get_num_threads())
    assert seen == [before + 1]
