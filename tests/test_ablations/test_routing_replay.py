"""Forced routing is what runs; a run forced onto its own routing is that run; what does not fit is one line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ablations.models import MoELanguageModel
from ablations.routing_replay import RoutingReplay
from traces.errors import GradreelError, NotRecorded
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder

_FILE = Path(__file__).with_name("tiny_experiment.py")
_SPEC = importlib.util.spec_from_file_location("tiny_experiment", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny)

STEPS, MICRO, VOCAB = 3, 2, 32
AT = RecordAt(streams=("routing", "scalars"))
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def own(**changes: Any) -> nn.Module:
    two = {"num_layers": 2, "moe_layers": (0, 1), "vocab_size": VOCAB, "router_weights": "softmax_topk"}
    return MoELanguageModel(replace(tiny.TINY, **{**two, **changes}))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SMALL))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own, one expert": own,
    "own, two of four": lambda: own(top_k=2, router_weights="softmax_topk_renormalised"),
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
}


def built(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name]()
    for parameter_name, parameter in model.named_parameters():  # some families begin with a router of zeros
        if parameter_name.endswith(("gate.weight", "router.weight")):
            nn.init.normal_(parameter, std=0.5)
    return model.train()


def batch(step: int, micro: int, length: int = 8) -> Tensor:
    return torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(100 * step + micro))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, micro: int = MICRO, length: int = 8
) -> Iterator[float]:
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for m in range(micro):
            ids = batch(step, m, length)
            logits = model(input_ids=ids).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            (loss / micro).backward()
            yield float(loss.detach())
        optimizer.step()


def recorded(name: str, path: Path, seed: int = 0, lr: float = 1e-2) -> tuple[nn.Module, list[float]]:
    model = built(name, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with Recorder(path, model, optimizer, at=AT, notify=lambda _: None):
        losses = list(train(model, optimizer))
    return model, losses


def ids_of(path: Path) -> np.ndarray:
    frame = open_trace(path).routing().collect().sort("layer", "step", "micro_step", "token")
    return frame.select([c for c in frame.columns if c.startswith("expert_")]).to_numpy()


@pytest.fixture(scope="module", params=list(MODELS))
def reel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any, Any]:
    path = tmp_path_factory.mktemp("reel") / "baseline.trace"
    model, losses = recorded(request.param, path)
    return request.param, path, model, losses


def test_a_run_forced_onto_its_own_routing_is_that_run(reel: tuple[str, Path, Any, Any]) -> None:
    name, path, before, losses = reel
    model = built(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with RoutingReplay(model, path, optimizer) as forcing:
        assert list(train(model, optimizer)) == losses
    assert forcing.forced == STEPS * MICRO * 2
    for (parameter, mine), theirs in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, theirs), parameter


def test_another_run_executes_the_recorded_ids(reel: tuple[str, Path, Any, Any], tmp_path: Path) -> None:
    name, path, *_ = reel
    free, forced = tmp_path / "free.trace", tmp_path / "forced.trace"
    recorded(name, free, seed=1, lr=3e-2)
    assert not np.array_equal(ids_of(free), ids_of(path))
    model = built(name, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    with (
        Recorder(forced, model, optimizer, at=AT, notify=lambda _: None),
        RoutingReplay(model, path, optimizer),
    ):
        moved = list(train(model, optimizer))
    assert np.array_equal(ids_of(forced), ids_of(path))
    assert np.isfinite(moved).all()
    routers = [p for n, p in model.named_parameters() if n.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == 2
    for router in routers:
        assert float(router.grad.abs().sum()) > 0


def test_weights_are_those_of_the_live_logits(tmp_path: Path) -> None:
    """Against softmax over the live logits, taken at the recorded ids."""
    path = tmp_path / "reel.trace"
    recorded("own, two of four", path)
    model = built("own, two of four", seed=5)
    seen = []
    router = model.layers[0].mlp.router
    handle = router.register_forward_hook(lambda m, a, out: seen.append([t.detach() for t in out]))
    with RoutingReplay(model, path):
        model(input_ids=batch(1, 0))
    handle.remove()
    logits, weights, ids = seen[0]
    wanted = next(iter(open_trace(path).routing_records(1))).topk_expert_ids
    assert np.array_equal(ids.numpy(), wanted)
    chosen = np.exp(logits.double().numpy())[np.arange(len(wanted))[:, None], wanted]
    assert np.allclose(weights.numpy(), chosen / chosen.sum(1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["own, one expert", "mixtral"])
def test_recomputation_gets_the_ids_of_its_forward(name: str, reentrant: bool, tmp_path: Path) -> None:
    path = tmp_path / "reel.trace"
    recorded(name, path, seed=3)
    plain, checkpointed = built(name), built(name)
    if name.startswith("own"):
        for layer in checkpointed.layers:
            layer.forward = _checkpointed(layer.forward, reentrant)
    else:
        checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    found = []
    for model in (plain, checkpointed):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with RoutingReplay(model, path, optimizer) as forcing:
            found.append((list(train(model, optimizer)), forcing.forced, [p.detach() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert found[1][1] == 2 * found[0][1]  # forward and recomputation
    assert all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))


def _checkpointed(forward: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(lambda *a: forward(*a, **kwargs), *args, use_reentrant=reentrant)


def test_backward_out_of_order_under_checkpointing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reel.trace"
    recorded("own, one expert", path)
    model = built("own, one expert")
    for layer in model.layers:
        layer.forward = _checkpointed(layer.forward, False)
    with RoutingReplay(model, path):
        total = sum(model(input_ids=batch(1, m)).logits.square().mean() for m in range(MICRO))
        with pytest.raises(GradreelError, match="call backward after each forward"):
            total.backward()


def test_evaluation_chooses_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "reel.trace"
    recorded("mixtral", path, seed=4)
    model = built("mixtral")
    free = model.eval()(input_ids=batch(1, 0)).logits
    with RoutingReplay(model, path) as forcing:
        assert torch.equal(model(input_ids=batch(1, 0)).logits, free)
        with torch.no_grad():
            model.train()(input_ids=batch(1, 0))
    assert forcing.forced == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": STEPS + 1}, r"step 4, micro-step 0, layer 0: only 0 micro-steps"),
        ({"micro": MICRO + 1}, r"step 1, micro-step 2, layer 0: only 2 micro-steps are recorded"),
        ({"micro": MICRO - 1}, r"step 1 was recorded with 2 micro-steps and trained with 1"),
        ({"length": 9}, r"step 1, micro-step 0, layer 0: 16 tokens are recorded, the model routes 18"),
    ],
)
def test_training_that_does_not_fit_is_one_line(options: dict[str, int], says: str, tmp_path: Path) -> None:
    path = tmp_path / "reel.trace"
    recorded("own, one expert", path)
    model = built("own, one expert")
    optimizer = torch.optim.AdamW(model.parameters())
    with RoutingReplay(model, path, optimizer), pytest.raises(GradreelError, match=says) as raised:
        list(train(model, optimizer, **options))
    assert "\n" not in str(raised.value)
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_thinned_trace_and_other_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "reel.trace"
    recorded("own, one expert", path)
    with pytest.raises(GradreelError, match="has 4 experts of which 1 run, the model 8 and 1"):
        RoutingReplay(own(num_experts=8), path)
    with pytest.raises(GradreelError, match="it has no layer 2"):
        RoutingReplay(own(num_layers=3, moe_layers=(0, 1, 2)), path)
    with pytest.raises(NotRecorded, match="step 9 is not recorded"):
        RoutingReplay(own(), path, first=9)
    thinned = tmp_path / "thin.trace"
    model = built("own, one expert")
    optimizer = torch.optim.AdamW(model.parameters())
    thin = RecordAt(every=2, streams=("routing", "scalars"))
    with Recorder(thinned, model, optimizer, at=thin, notify=lambda _: None):
        list(train(model, optimizer))
    with (
        RoutingReplay(model, thinned, optimizer),
        pytest.raises(NotRecorded, match=r"step 2 is not recorded \(steps 1 to 3, 2 of them\)"),
    ):
        list(train(model, optimizer))


def test_a_choice_that_cannot_be_replaced_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "reel.trace"
    recorded("own, one expert", path)
    model = built("own, one expert")
    router = model.layers[0].mlp.router

    def by_max(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(tokens, router.weight)
        best = logits.softmax(-1).max(-1, keepdim=True)
        return logits, best.values, best.indices

    router.forward = by_max
    with RoutingReplay(model, path), pytest.raises(GradreelError, match="made no choice of 1 out of 4"):
        model(input_ids=batch(1, 0))
