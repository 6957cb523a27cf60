"""Load and routing metrics against loops over tokens, and closed forms."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from toolkit.metrics import METRICS, Subject
from traces.errors import GradreelError
from traces.views import RoutingStep, StepView

E, K = 6, 2


def routing(step: int, ids: np.ndarray, is_pad: np.ndarray | None = None, **more: np.ndarray) -> RoutingStep:
    """A routing step whose counts are made token by token."""
    is_pad = np.zeros(len(ids), dtype=bool) if is_pad is None else is_pad
    counts = np.zeros(more.pop("experts", E), dtype=np.int64)
    for token, pad in zip(ids, is_pad, strict=True):
        for expert in token:
            counts[expert] += expert >= 0 and not pad
    return RoutingStep(step, 0, len(counts), ids, is_pad, counts, **more)


def stream(kind: str) -> list[RoutingStep]:
    rng = np.random.default_rng(sum(map(ord, kind)))
    steps = {"single": [4], "bursts": [1, 2, 3, 10, 11, 12]}.get(kind, list(range(1, 9)))
    out = []
    for step in steps:
        tokens = 0 if kind == "empty" or (kind == "pauses" and step % 3 == 0) else 40
        popularity = rng.dirichlet(np.ones(E) * (0.2 if kind == "skewed" else 2.0)) + 1e-9
        ids = np.array([rng.choice(E, K, replace=False, p=popularity / popularity.sum()) for _ in range(tokens)])
        ids = ids.reshape(tokens, K).astype(np.int64)
        is_pad = np.zeros(tokens, dtype=bool)
        if kind == "padded":
            is_pad = rng.random(tokens) < 0.5
        if kind == "dropped":
            ids[rng.random(ids.shape) < 0.3] = -1
        out.append(routing(step, ids, is_pad, logits=rng.normal(size=(tokens, E))))
    return out


KINDS = ["random", "skewed", "padded", "dropped", "single", "bursts", "pauses", "empty"]


def run(name: str, steps: list[RoutingStep], lags: tuple[int, ...] = (1, 3), probe: bool = False):
    metric = METRICS.get(name)
    state = metric.init(Subject(None, 0, steps[0].num_experts if steps else E, lags if metric.lags else ()))
    field = "probe" if probe else "routing"
    views = [StepView(step.step, layer=0, **{field: step}) for step in steps]
    return [m for view in views for m in metric.update(state, view) or ()], list(metric.result(state))


def tokens(step: RoutingStep) -> list[list[int]]:
    """The executed experts of each token that is not padding."""
    return [
        [int(e) for e in ids if e >= 0] for ids, pad in zip(step.topk_expert_ids, step.is_pad, strict=True) if not pad
    ]


def count(*steps: RoutingStep) -> list[int]:
    chosen = [e for step in steps for token in tokens(step) for e in token]
    return [chosen.count(e) for e in range(steps[0].num_experts)]


def gini(counts: list[int]) -> float:
    return sum(abs(a - b) for a in counts for b in counts) / (2 * len(counts) * sum(counts))


def entropy(counts: list[int]) -> float:
    return -sum(c / sum(counts) * np.log(c / sum(counts)) for c in counts if c)


FORMULAS = {
    "tokens_per_expert": lambda c: c,
    "expert_load": lambda c: [x / sum(c) for x in c],
    "max_vio": lambda c: max(c) * len(c) / sum(c) - 1,
    "load_cv": lambda c: float(np.sqrt(sum((x - sum(c) / len(c)) ** 2 for x in c) / len(c)) / (sum(c) / len(c))),
    "load_gini": gini,
    "expert_entropy": entropy,
    "dead_expert_fraction": lambda c: c.count(0) / len(c),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMULAS)
def test_loads(name: str, kind: str) -> None:
    steps = stream(kind)
    measured, (final,) = run(name, steps)
    assert [m.step for m in measured] == [s.step for s in steps]
    for measure, counts in [*zip(measured, map(count, steps), strict=True), (final, count(*steps))]:
        assert measure.support == sum(counts)
        if sum(counts) or name == "tokens_per_expert":
            np.testing.assert_allclose(measure.value, FORMULAS[name](counts), rtol=1e-12, atol=1e-12)
        else:
            assert np.isnan(measure.value)
    assert final.step is None


def test_loads_of_equal_and_of_one_expert() -> None:
    equal = routing(1, np.array([[0, 1], [2, 3], [4, 5]]))
    one = routing(1, np.array([[3, -1], [3, -1]]))
    for name, even, single in [
        ("max_vio", 0, E - 1),
        ("load_cv", 0, np.sqrt(E - 1)),
        ("load_gini", 0, (E - 1) / E),
        ("expert_entropy", np.log(E), 0),
        ("dead_expert_fraction", 0, (E - 1) / E),
    ]:
        assert run(name, [equal])[0][0].value == pytest.approx(even, abs=1e-12), name
        assert run(name, [one])[0][0].value == pytest.approx(single, abs=1e-12), name


@pytest.mark.parametrize("kind", KINDS)
def test_idle_run_length(kind: str) -> None:
    steps = stream(kind)
    measured, (final,) = run("idle_run_length", steps)
    for expert in range(E):
        longest, current, last = 0, 0, None
        for step, measure in zip(steps, measured, strict=True):
            current = 0 if last is not None and step.step != last + 1 else current
            current, last = (current + 1 if count(step)[expert] == 0 else 0), step.step
            assert measure.value[expert] == current
            longest = max(longest, current)
        assert final.value[expert] == longest


@pytest.mark.parametrize("kind", KINDS)
def test_co_activation(kind: str) -> None:
    steps = stream(kind)
    measured, final = run("co_activation", steps)
    assert not measured
    every = [token for step in steps for token in tokens(step)]
    if not any(every):
        assert not final
        return
    for expert in range(E):
        own = [token for token in every if expert in token]
        assert final[0].support[expert] == len(own)
        if not own:
            assert np.isnan(final[0].value[expert])
            continue
        wanted = max(sum(other in token for token in own) for other in range(E) if other != expert) / len(own)
        assert final[0].value[expert] == pytest.approx(wanted)


def test_co_activation_of_larger_k_and_of_a_single_expert() -> None:
    rng = np.random.default_rng(5)
    ids = np.array([rng.choice(E, 4, replace=False) for _ in range(50)])
    (measure,) = run("co_activation", [routing(1, ids)])[1]
    for a in range(E):
        own = [set(t) for t in ids if a in t]
        assert measure.value[a] == pytest.approx(max(sum(b in t for t in own) for b in range(E) if b != a) / len(own))
    (alone,) = run("co_activation", [routing(1, np.zeros((3, 1), dtype=np.int64), experts=1)])[1]
    assert np.isnan(alone.value).all()


@pytest.mark.parametrize("kind", KINDS)
def test_load_js_divergence(kind: str) -> None:
    steps = stream(kind)
    _, final = run("load_js_divergence", steps, (1, 3))
    recorded = {step.step: count(step) for step in steps}
    for measure in final:
        values = []
        for step in recorded:
            if not all(step - back in recorded for back in range(measure.lag + 1)):
                continue
            p, q = (np.array(recorded[s], dtype=float) for s in (step, step - measure.lag))
            if p.sum() and q.sum():
                values.append(entropy(list(p / p.sum() + q / q.sum())) - (entropy(list(p)) + entropy(list(q))) / 2)
        assert measure.support == len(values)
        if values:
            assert measure.value == pytest.approx(np.mean(values), abs=1e-12)
        else:
            assert np.isnan(measure.value)


def test_js_divergence_of_disjoint_loads_is_ln_2() -> None:
    steps = [routing(1, np.array([[0, 1]])), routing(2, np.array([[2, 3]]))]
    measured, _ = run("load_js_divergence", steps)
    assert np.isnan(measured[0].value)
    assert measured[1].value == pytest.approx(np.log(2))


@pytest.mark.parametrize("kind", KINDS)
def test_topk_margin(kind: str) -> None:
    for step, group in itertools.groupby(run("topk_margin", stream(kind))[0], key=lambda m: m.step):
        source = next(s for s in stream(kind) if s.step == step)
        margins = []
        for row, pad in zip(source.logits, source.is_pad, strict=True):
            ordered = sorted(row, reverse=True)
            margins += [] if pad else [ordered[K - 1] - ordered[K]]
        found = {m.flag: m for m in group}
        if not margins:
            assert np.isnan(found[""].value)
            continue
        assert found["mean"].value == pytest.approx(np.mean(margins))
        assert found["p10"].value == pytest.approx(np.percentile(margins, 10))
        assert found["mean"].support == len(margins)


def test_topk_margin_of_ties_all_experts_and_broken_logits() -> None:
    ids = np.array([[0, 1], [0, 1]])
    tied = routing(1, ids, logits=np.ones((2, E)))
    assert [m.value for m in run("topk_margin", [tied])[0]] == [0, 0, 0, 0]
    everyone = routing(1, np.array([[0, 1]]), logits=np.ones((1, 2)), experts=2)
    assert np.isnan(run("topk_margin", [everyone])[0][0].value)
    broken = np.arange(2.0 * E).reshape(2, E)
    broken[0, 0] = np.nan
    bad, mean, *_ = run("topk_margin", [routing(1, ids, logits=broken)])[0]
    assert (bad.value, bad.support) == (np.inf, 1)
    assert (mean.value, mean.support) == (1, 1)
    assert run("topk_margin", [replace(tied, logits=None)])[0] == []


def probes(number: int = 9, every: int = 1) -> list[RoutingStep]:
    rng = np.random.default_rng(7)
    ids = np.array([rng.choice(E, K, replace=False) for _ in range(30)])
    is_pad = np.arange(30) % 5 == 0
    out = []
    for i in range(number):
        for token in range(30):
            if rng.random() < 0.3:
                ids[token] = rng.choice(E, K, replace=False)
        out.append(routing(1 + i * every, ids.copy(), is_pad))
    return out


def test_router_saturation() -> None:
    steps = probes()
    _, final = run("router_saturation", steps, probe=True)
    assert [m.step for m in final] == [s.step for s in steps]
    for measure, step in zip(final, steps, strict=True):
        shares = [len(set(a) & set(b)) / K for a, b in zip(tokens(step), tokens(steps[-1]), strict=True)]
        assert measure.value == pytest.approx(np.mean(shares))
        assert measure.support == 24
    assert final[-1].value == 1


def test_router_saturation_keeps_a_bounded_number_of_probes() -> None:
    _, final = run("router_saturation", probes(300), probe=True)
    steps = [m.step for m in final]
    assert 33 <= len(steps) <= 65
    assert (steps[0], steps[-1]) == (1, 300)
    assert set(np.diff(steps[:-1])) == {8}


@pytest.mark.parametrize("every", [1, 3])
def test_routing_churn(every: int) -> None:
    steps = probes(every=every)
    _, final = run("routing_churn", steps, (1, 3), probe=True)
    by_step = {s.step: tokens(s) for s in steps}
    for measure in final:
        values = [
            np.mean([1 - len(set(a) & set(b)) / K for a, b in zip(now, by_step[step - measure.lag], strict=True)])
            for step, now in by_step.items()
            if step - measure.lag in by_step
        ]
        assert measure.support == len(values)
        np.testing.assert_allclose(measure.value, np.mean(values) if values else np.nan)


def test_last_fluctuation_step() -> None:
    steps = probes()
    _, final = run("last_fluctuation_step", steps, probe=True)
    table = [[set(t) for t in tokens(step)] for step in steps]
    last = []
    for token in range(len(table[0])):
        differing = [s.step for s, row in zip(steps, table, strict=True) if row[token] != table[-1][token]]
        last += [max(differing)] if differing else []
    found = {m.flag: m for m in final}
    assert found["mean"].value == pytest.approx(np.mean(last))
    assert found["p90"].value == pytest.approx(np.percentile(last, 90))
    assert found["mean"].support == len(last)
    (never,) = run("last_fluctuation_step", [steps[0], replace(steps[0], step=2)], probe=True)[1]
    assert np.isnan(never.value)


@pytest.mark.parametrize("name", ["router_saturation", "routing_churn", "last_fluctuation_step"])
def test_a_changing_probe_batch_is_refused(name: str) -> None:
    first, second = probes(2)
    shorter = replace(second, topk_expert_ids=second.topk_expert_ids[:20], is_pad=second.is_pad[:20])
    with pytest.raises(GradreelError, match="probe of step 2 has 16 tokens"):
        run(name, [first, shorter], probe=True)


def test_an_idle_run_ends_at_a_gap() -> None:
    steps = [routing(step, np.array([[0, 1]])) for step in (1, 2, 3, 9, 10)]
    measured, (final,) = run("idle_run_length", steps)
    assert [m.value[5] for m in measured] == [1, 2, 3, 1, 2]
    assert (final.value == [0, 0, 3, 3, 3, 3]).all()


def test_churn_of_dropped_slots_is_a_share_of_the_larger_choice() -> None:
    steps = [routing(1, np.array([[0, 1], [-1, -1]])), routing(2, np.array([[0, -1], [-1, -1]]))]
    (measure,), _ = run("routing_churn", steps, (1,), probe=True)
    assert (measure.value, measure.support) == (0.5, 1)
