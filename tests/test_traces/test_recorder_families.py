"""Every family of the table, in every implementation of its experts."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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
