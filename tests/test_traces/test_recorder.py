"""The recorder against a plain loop: what is recorded is what happened."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from traces.errors import GradreelError, NotRecorded, TraceError
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder
from traces.views import NONE, NONZERO, ZERO, StepView

DOWN, ROUTER = "layers.1.experts.down_proj", "layers.1.router.weight"


def run(
    model: nn.Module, optimizer: Any, batches: list[torch.Tensor], parts: Any, reel: Any = None, mask: Any = None
) -> list[dict]:
    """A plain loop; returns the gradients each step was taken with, and the ids that the router chose."""
    seen = []
    for batch in batches:
        if mask is not None:
            mask(torch.ones(2, 3))
        loss = parts.loss(model, batch)
        loss.backward()
        seen.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        if reel is not None:
            reel.log(loss=loss.detach())
    return seen


def chosen_ids(model: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Ids of layer 1 computed by hand, without any hook."""
    out = []
    for batch in batches:
        hidden = model.embed(batch)
        hidden = hidden + model.layers[0](hidden)
        out.append(model.layers[1].router(hidden.reshape(-1, hidden.shape[-1]))[2])
    return out


def test_gradients_weights_and_ids_are_those_of_the_run(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first_ids = chosen_ids(model, batches[:1])[0]
    first_weight = model.layers[1].experts.down_proj.detach().clone()
    with Recorder(tmp_path / "a.trace", model, optimizer, notify=notes.append) as reel:
        seen = run(model, optimizer, batches, parts, reel)
    trace = open_trace(tmp_path / "a.trace")
    assert trace.finished
    assert trace.verify() == []
    assert trace.steps == list(range(1, 9))
    for step in trace.steps:
        for name in (DOWN, ROUTER):
            assert torch.equal(trace.gradient(name, step), seen[step - 1][name])
    with pytest.raises(NotRecorded):
        trace.gradient("embed.weight", 1)
    assert torch.equal(trace.weight(DOWN, 1), first_weight)
    assert torch.equal(trace.weight(DOWN, 9), model.layers[1].experts.down_proj.detach())
    rows = trace.routing().collect().filter(step=1).sort("token")
    assert rows.select("expert_0", "expert_1").to_numpy().tolist() == first_ids.tolist()
    scalars = trace.scalars().filter(recorded=True)
    assert scalars["tokens"].to_list() == [12] * 8
    assert scalars["lr"].to_list() == [[1e-2]] * 8
    assert scalars["loss"].null_count() == 0
    total = torch.linalg.vector_norm(torch.cat([g.flatten() for g in seen[0].values()]))
    assert scalars["grad_norm"][0] == pytest.approx(float(total), rel=1e-5)
    assert "a recorded step" in notes[0]


def test_recording_does_not_change_the_run(tmp_path: Path, make_model, batches, parts, notes) -> None:
    plain, watched = make_model(), make_model()
    for model, recorded in ((plain, False), (watched, True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if recorded:
            with Recorder(tmp_path / "a.trace", model, optimizer, notify=notes.append) as reel:
                run(model, optimizer, batches, parts, reel)
        else:
            run(model, optimizer, batches, parts)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not watched._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_live_views_without_a_disk(make_model, batches, parts) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[list[StepView]] = []

    def keep(views: Any) -> None:
        steps.append([copy.copy(view) for view in views])
        for view in steps[-1]:
            view.gradient = None if view.gradient is None else view.gradient.clone()
            view.weight = None if view.weight is None else view.weight.clone()

    before = model.layers[1].experts.down_proj.detach().clone()
    ids = chosen_ids(model, batches[:1])[0].numpy()
    with Recorder(None, model, optimizer, on_step=keep):
        seen = run(model, optimizer, batches[:3], parts)
    assert [view.step for views in steps for view in views if view.param is None] == [1, 2, 3]
    by_name = {view.param.name: view for view in steps[0] if view.param is not None}
    assert set(by_name) == {DOWN, ROUTER, "layers.1.experts.up_proj"}
    assert torch.equal(by_name[DOWN].gradient, seen[0][DOWN])
    assert torch.equal(by_name[DOWN].weight, before)
    counts = np.bincount(ids.reshape(-1), minlength=parts.experts)
    assert by_name[DOWN].tokens_per_expert.tolist() == counts.tolist()
    assert by_name[DOWN].presence.tolist() == [NONZERO if count else ZERO for count in counts]
    assert by_name[DOWN].lr == 0.1
    routing = next(view.routing for view in steps[0] if view.param is None)
    assert routing.topk_expert_ids.tolist() == ids.tolist()
    assert routing.tokens_per_expert.tolist() == counts.tolist()


def test_idle_experts_none_against_zero(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 2: in a list of experts an idle one has no gradient, in a stack an exact zero; both are kept apart."""
    for name, moe in (("list", parts.List()), ("stack", parts.Moe())):
        model = make_model(moe)
        router = model.layers[1].chooser if name == "list" else model.layers[1].router
        with torch.no_grad():  # expert 4 is never chosen
            router.weight.mul_(0.01)
            router.weight[4] = 0
            if name == "list":
                router.bias.copy_(torch.tensor([1.0, 1, 1, 1, -9]))
            else:
                model.embed.weight.abs_()
                for layer in model.layers[0]:
                    layer.requires_grad_(False)
                model.layers[0][0].weight.zero_(), model.layers[0][0].bias.zero_()
                router.weight[4] = -9
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        with Recorder(tmp_path / name, model, optimizer, notify=notes.append):
            run(model, optimizer, batches[:1], parts)
        trace = open_trace(tmp_path / name)
        if name == "list":
            assert int(trace.presence("layers.1.experts.4.weight", 1)) == NONE
            assert trace.gradient("layers.1.experts.4.weight", 1) is None
            assert int(trace.presence("layers.1.experts.0.weight", 1)) == NONZERO
            assert trace.weight("layers.1.experts.4.weight", 2).equal(trace.weight("layers.1.experts.4.weight", 1))
        else:
            assert trace.presence(DOWN, 1)[4] == ZERO
            assert trace.presence(DOWN, 1)[:4].max() == NONZERO
            assert not trace.gradient(DOWN, 1)[4].any()


def test_a_list_of_experts_needs_no_layout(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model(parts.List())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with torch.no_grad():
        hidden = model.embed(batches[0])
        hidden = hidden + model.layers[0](hidden)
        expected = model.layers[1].chooser(hidden).softmax(-1).topk(2, dim=-1).indices.reshape(-1, 2)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        run(model, optimizer, batches[:2], parts)
    trace = open_trace(tmp_path / "a")
    routing = next(iter(trace.routing_steps(1)))
    assert routing.topk_expert_ids.tolist() == expected.tolist()
    assert trace.layers[0].top_k == 2


def test_a_rebuilt_choice_that_is_not_what_ran_is_refused(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model(parts.List(top_k=1))  # says 1, executes 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GradreelError, match=r"layers\.1\.experts.*experts were given.*read="):  # noqa: SIM117
        with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
            run(model, optimizer, batches[:2], parts)


@pytest.mark.parametrize("mode", ["reentrant", "not"])
def test_checkpointing_counts_once(tmp_path: Path, make_model, batches, parts, notes, mode: str) -> None:
    """Fault 6."""
    frames = []
    for name in (None, mode):
        model = make_model()
        model.checkpointing = name
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(tmp_path / f"{name}", model, optimizer, notify=notes.append):
            run(model, optimizer, batches[:3], parts)
        frames.append(open_trace(tmp_path / f"{name}").routing().collect())
    assert frames[0].equals(frames[1])
    assert len(frames[0]) == 3 * 12


def test_evaluation_generation_and_unused_forwards_do_not_count(
    tmp_path: Path, make_model, batches, parts, notes
) -> None:
    """Fault 7."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        for batch in batches[:3]:
            with torch.no_grad():
                model(batch)  # in training mode, as forgetful loops do
            parts.loss(model, batch)  # a loss that is looked at and thrown away
            parts.loss(model, batch).backward()
            model.eval()
            with torch.no_grad():
                model(batch.repeat(3, 1))
            model(batch)  # evaluation that forgot no_grad
            model.train()
            optimizer.step()
            optimizer.zero_grad()
    trace = open_trace(tmp_path / "a")
    assert trace.routing().collect().height == 3 * 12
    assert trace.scalars()["tokens"].to_list()[:3] == [12] * 3


def test_dense_layers_are_absent(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 9."""
    model = make_model(parts.Moe(), nn.Linear(parts.hidden, parts.hidden), parts.Moe())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        run(model, optimizer, batches[:2], parts)
    trace = open_trace(tmp_path / "a")
    assert [layer.layer for layer in trace.layers] == [1, 3]
    assert trace.routing().collect()["layer"].unique().sort().to_list() == [1, 3]
    assert not any(name.startswith("layers.2") and trace.presence(name, 1).any() for name in [DOWN, ROUTER])


def test_padding_from_attention_mask_and_by_hand(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 10: counts of a padded batch equal those of the batch without padding."""
    counts = []
    for case in ("bare", "keyword", "positional", "by_hand"):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = batches[0]
        padded = torch.cat([batch, torch.zeros_like(batch)], dim=1)
        mask = torch.cat([torch.ones_like(batch), torch.zeros_like(batch)], dim=1)
        with Recorder(tmp_path / case, model, optimizer, notify=notes.append) as reel:
            if case == "by_hand":
                reel.mask(mask)
            arguments = {"bare": (batch,), "positional": (padded, mask)}.get(case, (padded,))
            out = model(*arguments, **({"attention_mask": mask} if case == "keyword" else {}))
            out.square().mean().backward()
            optimizer.step()
        routing = next(iter(open_trace(tmp_path / case).routing_steps(1)))
        counts.append(routing.tokens_per_expert.tolist())
        assert routing.is_pad.sum() == (0 if case == "bare" else 12)
        assert open_trace(tmp_path / case).scalars()["tokens"][0] == 12
    assert counts.count(counts[0]) == 4


def test_a_mask_of_another_size_is_an_error(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GradreelError, match=r"routed 12 tokens, the attention mask has \(2, 3\).*reel\.mask"):  # noqa: SIM117
        with Recorder(tmp_path / "a", model, optimizer, notify=notes.append) as reel:
            run(model, optimizer, batches[:1], parts, mask=reel.mask)
    assert not (tmp_path / "a").exists()


def test_ties_are_recorded_as_executed(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 11: with all logits equal the router's own choice stands, whatever it is."""
    model = make_model()
    executed = []
    model.layers[1].router.register_forward_hook(lambda m, a, out: executed.append(out[2].clone()))
    with torch.no_grad():
        model.layers[1].router.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        run(model, optimizer, batches[:1], parts)
    routing = next(iter(open_trace(tmp_path / "a").routing_steps(1)))
    assert routing.topk_expert_ids.tolist() == executed[0].tolist()


def test_accumulation_records_the_sum_once(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 13: 1 x 8 against 4 x 2 sequences give the same gradient and the same counts."""
    data = torch.cat(batches[:4])
    results = []
    for pieces in (1, 4):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(tmp_path / str(pieces), model, optimizer, notify=notes.append):
            for piece in data.chunk(pieces):
                (parts.loss(model, piece) / pieces).backward()
            optimizer.step()
        trace = open_trace(tmp_path / str(pieces))
        rows = trace.routing().collect()
        assert rows["micro_step"].n_unique() == pieces
        routing = next(iter(trace.routing_steps(1)))
        results.append((trace.gradient(DOWN, 1), routing.tokens_per_expert.tolist(), trace.scalars()["tokens"][0]))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


def test_tied_embeddings_are_recorded_once(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 17."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, at=RecordAt(roles="all"), notify=notes.append):
        seen = run(model, optimizer, batches[:1], parts)
    trace = open_trace(tmp_path / "a")
    assert trace.params["name"].to_list().count("embed.weight") == 1
    assert "lm_head.weight" not in trace.params["name"].to_list()
    assert torch.equal(trace.gradient("embed.weight", 1), seen[0]["embed.weight"])


def test_bursts_scalars_of_unrecorded_steps_and_the_weight_stream(
    tmp_path: Path, make_model, batches, parts, notes
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = RecordAt(bursts=(2, 4), streams=("gradient", "weight", "routing", "scalars", "scores", "logits"))
    with Recorder(tmp_path / "a", model, optimizer, at=at, notify=notes.append) as reel:
        run(model, optimizer, batches, parts, reel)
    trace = open_trace(tmp_path / "a")
    assert trace.steps == [1, 2, 5, 6]
    assert trace.scalars()["loss"].null_count() == 1  # the closing snapshot's
    assert trace.scalars()["tokens"].to_list()[:8] == [12] * 8
    assert trace.weight(DOWN, 6) is not None
    assert trace.routing().collect()["step"].unique().sort().to_list() == [1, 2, 5, 6]
    routing = next(iter(trace.routing_steps(1)))
    assert routing.scores.shape == (12, 2)
    assert routing.logits.shape == (12, 5)
    ranked = np.sort(routing.logits, axis=1)[:, ::-1][:, :2]
    assert np.allclose(np.take_along_axis(routing.logits, routing.topk_expert_ids, 1), ranked)


def test_a_router_of_probabilities_is_not_softmaxed_twice(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 8: softmax of the recorded logits gives the router's own probabilities."""
    model = make_model()
    router = model.layers[1].router
    plain = type(router).forward
    seen = []

    def forward(tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, ids = plain(router, tokens)
        seen.append(logits.softmax(-1).detach())
        return logits.softmax(-1), weights, ids

    router.forward = forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = RecordAt(streams=("routing", "logits", "scalars"))
    with Recorder(tmp_path / "a", model, optimizer, at=at, notify=notes.append):
        run(model, optimizer, batches[:1], parts)
    routing = next(iter(open_trace(tmp_path / "a").routing_steps(1)))
    assert torch.allclose(torch.from_numpy(routing.logits.copy()).softmax(-1), seen[0], atol=1e-6)


def test_a_sample_of_experts_and_bfloat16(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = RecordAt(experts=(1, 3), dtype="bfloat16")
    with Recorder(tmp_path / "a", model, optimizer, at=at, notify=notes.append):
        seen = run(model, optimizer, batches[:2], parts)
    trace = open_trace(tmp_path / "a")
    recorded = trace.gradient(DOWN, 2, experts=[1, 3])
    assert recorded.dtype == torch.bfloat16
    assert torch.equal(recorded, seen[1][DOWN][[1, 3]].bfloat16())
    assert trace.presence(DOWN, 2).shape == (5,)  # presence of every expert, recorded or not


def test_mistakes_are_told_before_training(tmp_path: Path, make_model, parts) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GradreelError, match=r"no MoE layer"):
        Recorder(tmp_path / "a", nn.Linear(2, 2), optimizer)
    with pytest.raises(GradreelError, match=r"optimizer holds none of the parameters"):
        Recorder(tmp_path / "a", model, torch.optim.SGD(make_model().parameters(), lr=1))
    with pytest.raises(GradreelError, match=r"budget '1KB' is too small"):
        Recorder(tmp_path / "a", model, optimizer, at=RecordAt(budget="1KB"))
    with pytest.raises(GradreelError, match=r"on_step=f"):
        Recorder(None, model, optimizer)
    with pytest.raises(GradreelError, match=r"stream 'probe' needs a batch"):
        Recorder(tmp_path / "a", model, optimizer, at=RecordAt(streams=("probe",)))
    with pytest.raises(GradreelError, match=r"is a dict, not a torch\.optim\.Optimizer"):
        Recorder(tmp_path / "a", model, {})
    model.layers[1].requires_grad_(False)
    with pytest.raises(GradreelError, match=r"no trainable parameter has a role"):
        Recorder(tmp_path / "a", model, optimizer)
    assert not (tmp_path / "a").exists()


def test_a_folder_with_a_trace_is_refused(tmp_path: Path, make_model, batches, parts, notes) -> None:
    """Fault 32."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        run(model, optimizer, batches[:1], parts)
    with pytest.raises(TraceError, match=r"already holds a trace"):
        Recorder(tmp_path / "a", model, optimizer)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(TraceError, match=r"is not an empty folder"):
        Recorder(tmp_path / "b", model, optimizer)


def test_a_step_without_gradients_is_an_error(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        with Recorder(tmp_path / "a", model, optimizer, at=RecordAt(streams=("gradient",)), notify=notes.append):
            parts.loss(model, batches[0])
            optimizer.step()

    with pytest.raises(GradreelError, match=r"routed experts have no gradient at the first step.*backward"):
        loop()


def test_no_step_is_an_error_and_leaves_no_folder(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(GradreelError, match=r"no optimizer step was seen"),
        Recorder(tmp_path / "a", model, optimizer, notify=notes.append),
    ):
        parts.loss(model, batches[0]).backward()
    assert not (tmp_path / "a").exists()


def test_the_header_says_what_decides_bits(tmp_path: Path, make_model, batches, parts, notes) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), foreach=False)
    with Recorder(tmp_path / "a", model, optimizer, notify=notes.append):
        parts.loss(model, batches[0]).backward()
        optimizer.step()
    run = open_trace(tmp_path / "a").header.run
    assert run["groups"][0]["tensor_lr"] is True
    assert run["groups"][0]["lr"] == torch.tensor(1e-3).item()
    assert run["threads"] == torch.get_num_threads()
    assert run["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert run["foreach"] is False
