"""One rank's routing of a step, micro-step by micro-step, as it was recorded.

Legend: E experts, K top-k, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from traces._rank import RankFolder
from traces.chunks import ChunkFile
from traces.schema import RawTensor, RoutingRecord


def micro_steps(rank: RankFolder, step: int) -> Iterator[RoutingRecord]:
    """The routing records of a step, by layer and micro-step, padding included; nothing where none was recorded."""
    seal = rank.seal_of(step)
    if seal is None:
        return
    file, at = rank.routing(seal), -1
    streams = {name: rank.chunk(seal, name) for name in ("scores", "logits")}
    layers = rank.tables.layers
    before = None
    for layer, micro, count in sorted(rank.step(step).routing):
        if layer != before:
            before, at = layer, rank.row_start(seal, step, layer)
        names = [f"expert_{k}" for k in range(layers[layer].top_k)]
        if count and file is not None:
            data = file.rows(at, at + count, ["is_pad", *names])
            ids, pads = np.stack([data[name] for name in names], axis=1), data["is_pad"]
        else:
            ids, pads = np.empty((0, len(names)), np.int64), np.empty(0, np.bool_)
        at += count
        kept = {name: _tensor(chunk, (step, name, f"{layer}.{micro}")) for name, chunk in streams.items()}
        yield RoutingRecord(layer, micro, ids, pads, kept["scores"], kept["logits"])


def _tensor(chunk: ChunkFile | None, key: tuple[int, str, str]) -> RawTensor | None:
    slot = None if chunk is None else chunk.index().get(key)
    if slot is None or chunk is None:
        return None
    return RawTensor(slot.dtype, slot.shape, chunk.read(slot))
