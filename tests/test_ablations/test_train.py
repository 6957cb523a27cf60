"""The training loop: it learns, it repeats itself, and a diverged run is a row."""

import itertools
import math
from pathlib import Path

import polars as pl
import pytest
import torch

from ablations.data.corpus import stdlib_corpus
from ablations.models import MoEConfig, MoELanguageModel
from ablations.train import Schedule, StepReport, TrainResult, evaluate, train
from toolkit.frame import SCHEMA
from toolkit.optim import make_optimizer
from traces import GradreelError

SMALL = MoEConfig(
    vocab_size=256,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=32,
    dense_hidden=48,
    expert_hidden=32,
    num_experts=4,
    top_k=2,
    moe_layers=(1,),
)


def small_run(
    steps: int, accumulation: int = 1, batch: int = 8, spoil_at: int | None = None, lr: float = 3e-3
) -> tuple[MoELanguageModel, TrainResult, list[StepReport]]:
    torch.manual_seed(0)
    model, corpus = MoELanguageModel(SMALL), stdlib_corpus()
    logged: list[StepReport] = []

    def batches(step: int, micro_step: int) -> dict[str, torch.Tensor]:
        if step == spoil_at:
            with torch.no_grad():
                model.final_norm.weight[0] = float("nan")
        whole = corpus.batch(0, step, 8, 32)
        return {k: v[micro_step * batch : (micro_step + 1) * batch] for k, v in whole.items()}

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = Schedule(steps, steps // 10)
    result = train(
        model, optimizer, batches, steps, schedule=schedule, accumulation=accumulation, on_step=logged.append
    )
    assert optimizer.param_groups[0]["lr"] == lr
    return model, result, logged


def test_the_loss_falls_on_text_it_has_not_seen() -> None:
    torch.manual_seed(0)
    held_out = stdlib_corpus().valid_batches(4, 8, 32)
    before = evaluate(MoELanguageModel(SMALL), held_out)
    model, result, logged = small_run(60)
    after = evaluate(model, held_out)
    assert before == pytest.approx(math.log(256), abs=0.1)
    assert after < before - 1.5
    assert result.diverged_at is None
    assert result.reports == logged
    assert model.training


def test_equal_runs_give_equal_losses() -> None:
    assert small_run(5)[1].losses == small_run(5)[1].losses


def test_accumulation_equals_the_whole_batch() -> None:
    whole, parts = small_run(3)[1], small_run(3, accumulation=4, batch=2)[1]
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    assert parts.reports[0].grad_norm == pytest.approx(whole.reports[0].grad_norm, rel=2e-2)


def test_a_diverged_run_is_a_row_and_leaves_the_weights() -> None:
    model, result, logged = small_run(10, spoil_at=4)
    assert result.diverged_at == 4
    assert len(result.losses) == len(logged) == 4
    assert math.isnan(result.losses[-1])
    assert all(p.isfinite().all() for name, p in model.named_parameters() if name != "final_norm.weight")
    frame = pl.DataFrame(list(result.rows("r", "adamw")), schema_overrides={"flag": SCHEMA["flag"]})
    assert frame["flag"].to_list() == ["", "", "", "diverged"]
    assert frame["value"].null_count() == 1


def test_the_clip_factor_is_what_was_applied() -> None:
    seen: list[tuple[float, float]] = []
    torch.manual_seed(0)
    model, corpus = MoELanguageModel(SMALL), stdlib_corpus()

    def on_step(report: StepReport) -> None:
        left = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        seen.append((float(left), report.grad_norm * report.clip_factor))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, lambda step, _: corpus.batch(0, step, 4, 32), 3, clip=0.2, on_step=on_step)
    for left, expected in seen:
        assert left == pytest.approx(expected, rel=1e-4)
        assert left <= 0.2 * 1.001


def test_the_schedule_rises_then_falls_and_never_rests_at_zero() -> None:
    schedule = Schedule(steps=100, warmup=10)
    factors = [schedule.factor(step) for step in range(1, 101)]
    assert factors[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert all(a > b for a, b in itertools.pairwise(factors[9:]))
    assert 0 < factors[-1] < 1e-3
    assert Schedule(steps=4, warmup=0, floor=1.0).factor(4) == 1.0


def test_other_schedules_end_where_they_say() -> None:
    linear, constant, wsd = (Schedule(99, 0, 0.1, shape) for shape in ("linear", "constant", "wsd"))
    assert linear.factor(50) == pytest.approx(0.55)
    assert linear.factor(99) == pytest.approx(0.1 + 0.9 * 0.01)  # one part of a hundred is left
    assert {constant.factor(step) for step in (1, 50, 99)} == {1.0}
    assert wsd.factor(60) == 1.0
    assert wsd.factor(91) == pytest.approx(0.1 + 0.9 * 0.45)
    with pytest.raises(GradreelError, match="unknown schedule 'steps'"):
        Schedule(10, shape="steps")


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 5, "warmup": 6}, {"steps": 5, "floor": 2.0}])
def test_a_wrong_schedule_is_named(wrong: dict[str, float]) -> None:
    with pytest.raises(GradreelError, match="allowed: "):
        Schedule(**wrong)


def test_padding_weighs_nothing_in_evaluation() -> None:
    torch.manual_seed(0)
    model = MoELanguageModel(SMALL)
    batch = stdlib_corpus().valid_batches(1, 2, 16)[0]
    padded = {k: torch.cat([v, torch.zeros_like(v)], dim=1) for k, v in batch.items()}
    padded["attention_mask"] = torch.cat([torch.ones_like(batch["labels"]), torch.zeros_like(batch["labels"])], dim=1)
    short = {k: v[:1] for k, v in batch.items()}
    assert evaluate(model, [padded, short]) == pytest.approx(evaluate(model, [batch, short]), rel=1e-5)
    with pytest.raises(GradreelError, match="no tokens"):
        evaluate(model, [])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache: Path = tmp_path_factory.getbasetemp() / "corpus-cache"
    monkeypatch.setenv("GRADREEL_CACHE", str(cache))


def test_clipping_sees_the_fresh_gradient_of_hidden_momentum_and_clips_it() -> None:
    # The norm that is reported is that of this step alone, whichever optimizer trains.
    reports: dict[str, list[float]] = {}
    batch = stdlib_corpus().batch(0, 1, 2, 32)
    for mode in ("attached", "apart"):
        torch.manual_seed(0)
        model = MoELanguageModel(SMALL)
        optimizer = make_optimizer(model, "mesh", lr=0.0, sage_weight_decay=0.0, hidden_momentum=mode)
        result = train(model, optimizer, lambda step, _: batch, 4, clip=0.2)
        reports[mode] = [report.grad_norm for report in result.reports]
        assert all(report.clip_factor < 1 for report in result.reports)
        experts = next(p for p in model.parameters() if p.dim() == 3)
        buffer = optimizer.state[experts]["buffer"]
        # Four times the same clipped gradient, decayed: beta + .. + beta^4 of it.
        optimizer.zero_grad()
        model(**batch).loss.backward()
        fresh = optimizer.fresh_gradient(experts)
        assert fresh is not None
        decayed = sum(0.9**k for k in range(1, 5)) * result.reports[0].clip_factor
        history = buffer - fresh if mode == "attached" else buffer
        torch.testing.assert_close(history, decayed * fresh, rtol=1e-3, atol=1e-6)
    assert reports["attached"] == pytest.approx([reports["apart"][0]] * 4, rel=1e-5)
