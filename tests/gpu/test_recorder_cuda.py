"""Recording on a CUDA device: side stream and pinned buffers give the bits of `p.grad`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ablations.models.moe import MoEConfig, MoELanguageModel
from traces.reader import open_trace
from traces.recorder import Recorder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_and_ids_on_cuda(tmp_path: Path, set_to_none: bool) -> None:
    torch.manual_seed(0)
    config = MoEConfig(
        vocab_size=64,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_positions=64,
        dense_hidden=64,
        expert_hidden=128,
        num_experts=8,
        top_k=2,
        moe_layers=(0, 1),
    )
    model = MoELanguageModel(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    down = "layers.1.mlp.experts.down_proj"
    kept = []
    with Recorder(tmp_path / "a", model, optimizer, notify=lambda message: None) as reel:
        for _ in range(20):
            ids = torch.randint(0, 64, (4, 33), device="cuda")
            out = model(ids[:, :-1], labels=ids[:, 1:])
            out.loss.backward()
            kept.append(model.layers[1].mlp.experts.down_proj.grad.clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            reel.log(loss=out.loss)
    trace = open_trace(tmp_path / "a")
    assert trace.steps == list(range(1, 21))
    assert all(torch.equal(trace.gradient(down, step), kept[step - 1].cpu()) for step in trace.steps)
    assert torch.equal(trace.weight(down, 21), model.layers[1].mlp.experts.down_proj.detach().cpu())
    assert trace.routing().collect().height == 20 * 2 * 128
    assert trace.scalars()["loss"].null_count() == 1
