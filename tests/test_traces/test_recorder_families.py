"""Every family of the table, in every implementation of its experts."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from traces.errors import GradreelError
from traces.reader import open_trace
from traces.record_at import RecordAt
from traces.recorder import Recorder
from traces.roles import describe_params
from traces.views import NONE, ZERO

pytest.importorskip("transformers", reason="the `hf` extra is not installed")


def load_table() -> ModuleType:
    path = Path(__file__).with_name("family_table.py")
    spec = importlib.util.spec_from_file_location("family_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["family_table"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


table = load_table()
BY_NAME = {row.name: row for row in table.ROWS}
CASES = [
    pytest.param(row, implementation, id=f"{row.name} {implementation or ''}".rstrip())
    for row in table.ROWS
    for implementation in row.implementations
]
#: 13 and 8 real tokens: padding on the right of the encoder's second sequence and of the decoder's first.
MASK = torch.ones(2, 8, dtype=torch.long).masked_fill(torch.arange(16).view(2, 8) >= 13, 0)
DECODER_MASK = torch.ones(2, 5, dtype=torch.long).masked_fill(torch.tensor([[0, 0, 0, 1, 1], [0] * 5]).bool(), 0)


class Oracle:
    """Hooks of the test's own on the modules that make the logits; `executed()` gives ids [T, K] layer by layer."""

    def __init__(self, row: Any, model: nn.Module) -> None:
        self.row, self.logits = row, {}
        self.routers: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if name.endswith(row.logits_of):
                inner = row.logits_of.rpartition(".")[2] in ("classifier", "layer")
                self.routers[name] = model.get_submodule(name.rpartition(".")[0]) if inner else module
                module.register_forward_hook(self._keep(name))

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self.logits[name] = (output if isinstance(output, Tensor) else output[0]).detach()

        return hook

    def executed(self, tokens: Tensor, own: tuple[Tensor, ...] | None) -> list[np.ndarray]:
        logits = list(self.logits.values()) if own is None else own
        pairs = zip(logits, self.routers.values(), strict=True)
        return [self.row.executed(one.detach(), router, tokens).numpy() for one, router in pairs]


def forward(row: Any, model: Any, batch: Tensor, **more: Any) -> Any:
    if row.name == "switch_transformers":
        more |= {"decoder_attention_mask": DECODER_MASK}
        return model(input_ids=batch, attention_mask=MASK, labels=batch[:, :5].contiguous(), **more)
    if row.own_logits:
        more |= {"output_router_logits": True}
    return model(input_ids=batch, attention_mask=MASK, labels=batch, **more)


def real_tokens(name: str) -> np.ndarray:
    return (DECODER_MASK if name.startswith("decoder.") else MASK).reshape(-1).bool().numpy()


@pytest.mark.parametrize(("row", "implementation"), CASES)
def test_family(tmp_path: Path, notes: list[str], row: Any, implementation: str | None) -> None:
    """Ids equal the rule applied to the model's own logits, token by token; gradients equal `p.grad`, bit for bit."""
    model = row.build(implementation)
    oracle = Oracle(row, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randint(3, table.VOCAB, (2, 2, 8), generator=torch.Generator().manual_seed(2))
    expected, gradients = [], []
    at = RecordAt(streams=("gradient", "routing", "scalars", "scores", "logits"))
    with Recorder(tmp_path / "a", model, optimizer, at=at, notify=notes.append) as reel:
        for batch in batches:
            out = forward(row, model, batch)
            out.loss.backward()
            expected.append(oracle.executed(batch, out.router_logits if row.own_logits else None))
            gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            reel.log(loss=out.loss.detach())
            model.eval()
            with torch.no_grad():
                if hasattr(model, "generate"):
                    model.generate(batch[:1, :4], max_new_tokens=2, do_sample=False)
            forward(row, model, batch)  # in evaluation, though with gradients
            model.train()
    trace = open_trace(tmp_path / "a")
    assert trace.verify() == []
    assert [layer.layer for layer in trace.layers] == list(row.layers)
    for place, layer in enumerate(trace.layers):
        real = real_tokens(layer.module)
        for routing, ids in zip(trace.routing_steps(layer.layer), expected, strict=True):
            assert np.array_equal(np.sort(routing.topk_expert_ids), np.sort(ids[place]))
            assert np.array_equal(routing.is_pad, ~real)
            mine = ids[place][real]
            counts = np.bincount(mine[mine >= 0], minlength=row.num_experts)
            assert routing.tokens_per_expert.tolist() == counts.tolist()
            assert counts.sum() + (mine < 0).sum() == real.sum() * row.top_k
            idle = set(range(row.num_experts)) - set(ids[place].reshape(-1).tolist())
            check_idle(trace, routing.step, layer.layer, idle)
    recorded = [info for info in describe_params(model) if info.role in ("router", "routed_expert")]
    assert recorded
    for step, grads in enumerate(gradients, start=1):
        for info in recorded:
            kept, own = trace.gradient(info.name, step), grads[info.name]
            assert (kept is None) == (own is None)
            assert own is None or torch.equal(kept, own.reshape(info.shape))
    assert trace.scalars()["tokens"].to_list()[:2] == [13, 13]


def check_idle(trace: Any, step: int, layer: int, idle: set[int]) -> None:
    """What no token chose, padding included, has no gradient, or an exact zero in a stack."""
    for info in trace.params.iter_rows(named=True):
        if info["layer"] != layer or info["role"] != "routed_expert":
            continue
        presence = trace.presence(info["name"], step)
        if presence.ndim:
            assert all(presence[expert] == ZERO for expert in idle if expert < len(presence))
        elif trace.param(info["name"]).expert in idle:
            assert presence == NONE


def some(*names: str, without: str | None = None) -> list[Any]:
    """Every family but `without` as a parameter; those not named only in the long tests."""
    rows = [(row, () if row.name in names else (pytest.mark.full,)) for row in table.ROWS if row.name != without]
    return [pytest.param(row, id=row.name, marks=marks) for row, marks in rows]


def train(row: Any, model: Any, path: Path, notes: list[str], steps: int = 2, around: Any = nullcontext) -> Any:
    """Record a few steps of forward, backward and SGD; `around` surrounds the forwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randint(3, table.VOCAB, (steps, 2, 8), generator=torch.Generator().manual_seed(2))
    with Recorder(path, model, optimizer, notify=notes.append):
        for batch in batches:
            with around():
                loss = forward(row, model, batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return open_trace(path)


@pytest.mark.parametrize("row", some("mixtral", "llama4", "switch_transformers"))
def test_checkpointing_in_a_family(tmp_path: Path, notes: list[str], row: Any) -> None:
    """Fault 6: both modes count what the plain run counts."""
    plain = train(row, row.build(), tmp_path / "plain", notes).routing().collect()
    for reentrant in (True, False):
        model = row.build()
        if not getattr(model, "supports_gradient_checkpointing", False):
            return  # the project's own model has no switch for it, see test_recorder.py
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert train(row, model, tmp_path / str(reentrant), notes).routing().collect().equals(plain)


# DBRX's own forward adds bfloat16 to float32 under autocast, which torch refuses.
@pytest.mark.parametrize("row", some("mixtral", "llama4", "switch_transformers", without="dbrx"))
def test_ids_under_autocast_are_those_executed(tmp_path: Path, notes: list[str], row: Any) -> None:
    """Fault 12: read off the experts' own arguments, not chosen anew from logits in another precision."""
    model = row.build()
    seen: dict[str, list[np.ndarray]] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            seen.setdefault(name, []).append(chosen_in(row, args))

        return hook

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(keep(name))
    trace = train(row, model, tmp_path / "a", notes, around=lambda: torch.autocast("cpu", torch.bfloat16))
    assert len(seen) == len(trace.layers)
    for layer in trace.layers:
        for routing, chosen in zip(trace.routing_steps(layer.layer), seen[f"{layer.module}.experts"], strict=True):
            ids = routing.topk_expert_ids
            mine = np.zeros((len(ids), row.num_experts + 1), bool)
            np.put_along_axis(mine, ids, True, axis=1)  # -1 goes to the last column
            assert np.array_equal(mine[:, :-1], chosen)


def chosen_in(row: Any, args: tuple[Any, ...]) -> np.ndarray:
    """bool [T, E] of what an experts module is asked to run: rows that are not zeroed, a mask, or ids."""
    if row.name == "llama4":
        return args[0].detach().view(row.num_experts, -1, args[0].shape[-1]).any(-1).T.numpy()
    if row.name == "switch_transformers":
        return args[1].bool().any(1).numpy()
    return nn.functional.one_hot(args[1], row.num_experts).bool().any(1).numpy()


@pytest.mark.parametrize("row", some("mixtral", "deepseek_v4, hash layers"))
def test_padding_counts_for_nothing(tmp_path: Path, notes: list[str], row: Any) -> None:
    """Fault 10: half of each sequence is padding, on the right; counts are those of the batch without it."""
    batch = torch.randint(3, table.VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))
    counts = []
    for padded in (False, True):
        model = row.build()
        ids = torch.cat([batch, torch.zeros_like(batch)], dim=1) if padded else batch
        mask = (torch.arange(ids.shape[1]) < 5).long().expand_as(ids)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder(tmp_path / str(padded), model, optimizer, notify=notes.append):
            model(input_ids=ids, attention_mask=mask, labels=batch if padded is False else ids).loss.backward()
            optimizer.step()
        trace = open_trace(tmp_path / str(padded))
        layers = [layer for layer in trace.layers if not layer.module.startswith("decoder.")]
        counts.append([next(iter(trace.routing_steps(one.layer))).tokens_per_expert.tolist() for one in layers])
    assert counts[0] == counts[1]


def test_a_random_choice_is_recorded_as_it_fell(tmp_path: Path, notes: list[str]) -> None:
    """The sparse mixer of phimoe draws its experts in training."""
    row = replace(BY_NAME["phimoe"], config={**BY_NAME["phimoe"].config, "router_jitter_noise": 0.5})
    model = row.build()
    drawn: list[Tensor] = []
    model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda m, args: drawn.append(args[1].clone()) or None)
    trace = train(row, model, tmp_path / "a", notes, steps=3)
    recorded = [routing.topk_expert_ids for routing in trace.routing_steps(1)]
    assert np.array_equal(np.concatenate(recorded), torch.cat(drawn).numpy())


def test_weights_tied_three_times_are_recorded_once(tmp_path: Path, notes: list[str]) -> None:
    """Fault 17: one embedding serves encoder, decoder and head."""
    row = BY_NAME["switch_transformers"]
    model = row.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(tmp_path / "a", model, optimizer, at=RecordAt(roles="all"), notify=notes.append):
        forward(row, model, torch.arange(3, 19).view(2, 8)).loss.backward()
        gradient = model.shared.weight.grad.clone()
        optimizer.step()
    trace = open_trace(tmp_path / "a")
    assert [name for name in trace.params["name"] if "embed" in name or "head" in name or "shared" in name] == [
        "shared.weight"
    ]
    assert torch.equal(trace.gradient("shared.weight", 1), gradient)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "llama4"])
def test_compiled_families(tmp_path: Path, notes: list[str], name: str) -> None:
    """Compiled inside the recording: the same routing. Called before it: the same, or an error naming the module."""
    row = BY_NAME[name]
    plain = train(row, row.build(), tmp_path / "plain", notes).routing().collect()
    torch.compiler.reset()
    early = train(row, torch.compile(row.build(), backend="eager"), tmp_path / "early", notes)
    assert early.routing().collect().equals(plain)
    torch.compiler.reset()
    model = torch.compile(row.build(), backend="eager")
    forward(row, model, torch.arange(3, 19).view(2, 8)).loss.backward()
    model.zero_grad()
    refused = ""
    try:
        train(row, model, tmp_path / "late", notes)
    except GradreelError as error:
        refused = str(error)
    if refused:
        assert re.search(r"experts.*compiled", refused)
    else:
        assert open_trace(tmp_path / "late").routing().collect().equals(plain)


@pytest.mark.parametrize("row", table.ROWS, ids=lambda row: row.name)
def test_roles_and_matrices_of_a_family(row: Any) -> None:
    """Every parameter has its role; rows of experts' matrices are output features, whichever way they are stored."""
    infos = describe_params(row.build())
    assert dict(Counter(info.role for info in infos)) == row.roles
    seen = {}
    for info in infos:
        if info.role != "routed_expert":
            continue
        assert info.layer is not None
        assert (info.expert is None) != (info.expert_axis is None)
        if info.matrix_axes is not None:
            leaf = info.name.removesuffix(".weight").rpartition(".")[2]
            seen[leaf] = tuple(info.shape[axis] for axis in info.matrix_axes)
    assert seen == row.experts


def test_table_in_readme() -> None:
    page = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    found = re.search(r"<!-- families -->\n(.*?)\n<!-- /families -->", page, re.DOTALL)
    assert found, "README.md holds no <!-- families --> .. <!-- /families -->"
    # To renew it: python tests/test_traces/family_table.py
    assert found.group(1).strip() == table.overview()
