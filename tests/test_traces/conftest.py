"""Small MoE models and loops for the recorder's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, EXPERTS, TOP_K, VOCAB = 8, 5, 2, 16


class PlainRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(tokens, self.weight)
        weights, ids = logits.softmax(-1).topk(TOP_K, dim=-1)
        return logits, weights, ids


class PlainExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, 6, HIDDEN) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 6) * 0.3)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        up = torch.einsum("tkfd,td->tkf", self.up_proj[indices], tokens)
        down = torch.einsum("tkdf,tkf->tkd", self.down_proj[indices], up.relu())
        return (down * weights.unsqueeze(-1)).sum(1)


class PlainMoe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = PlainRouter()
        self.experts = PlainExperts()

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, HIDDEN)
        _, weights, ids = self.router(tokens)
        return self.experts(tokens, ids, weights).view_as(hidden)


class ListMoe(nn.Module):
    """A list of experts and a linear router that returns logits only; an idle expert gets no gradient at all."""

    def __init__(self, top_k: int = TOP_K) -> None:
        super().__init__()
        self.top_k = top_k
        self.chooser = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, HIDDEN)
        weights, ids = self.chooser(tokens).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = (ids == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return out.view_as(hidden)


class PlainModel(nn.Module):
    """A dense block, then MoE blocks; `checkpointing` recomputes the blocks in backward (None, "reentrant", "not")."""

    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        blocks = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU()), *(mlps or (PlainMoe(),))]
        self.layers = nn.ModuleList(blocks)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.embed.weight
        self.checkpointing: str | None = None

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            if self.checkpointing:
                from torch.utils.checkpoint import checkpoint

                hidden = hidden + checkpoint(layer, hidden, use_reentrant=self.checkpointing == "reentrant")
            else:
                hidden = hidden + layer(hidden)
        return self.lm_head(hidden)


def plain_loss(model: nn.Module, batch: Tensor, mask: Tensor | None = None) -> Tensor:
    logits = model(batch, attention_mask=mask) if mask is not None else model(batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


@pytest.fixture
def make_model() -> Callable[..., PlainModel]:
    def make(*mlps: nn.Module, seed: int = 0) -> PlainModel:
        torch.manual_seed(seed)
        return PlainModel(*mlps)

    return make


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (2, 6), generator=generator) for _ in range(8)]


@pytest.fixture
def parts() -> Any:
    """The classes and functions above, for tests that build their own models."""

    class Parts:
        Moe, List, Model, Router, Experts = PlainMoe, ListMoe, PlainModel, PlainRouter, PlainExperts
        loss = staticmethod(plain_loss)
        experts, hidden, top_k = EXPERTS, HIDDEN, TOP_K

    return Parts


@pytest.fixture
def notes() -> list[str]:
    """What a Recorder has to say: pass `notify=notes.append`."""
    return []


class FakeCuda:
    """Streams and events that only write down what is asked of them, with the thread that asks."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        fake = self

        class Stream:
            def __init__(self, device: Any = None, name: str = "side") -> None:
                self.name = name

            def wait_stream(self, other: Any) -> None:
                fake.note(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Any) -> None:
                fake.note(f"{self.name} waits for event")

        class Event:
            def record(self, stream: Any) -> None:
                fake.note(f"event after {stream.name}")

            def synchronize(self) -> None:
                fake.note("host waits")

        self.Stream, self.Event, self.main = Stream, Event, Stream(name="main")

    def note(self, what: str) -> None:
        self.log.append((what, threading.current_thread().name))

    def current_stream(self, device: Any) -> Any:
        return self.main

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.note(f"on {stream.name}")
        yield


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return FakeCuda()


@pytest.fixture
def fake_cuda() -> type:
    """The class of `fake`, which leaves torch's own `record_stream` in place."""
    return FakeCuda
