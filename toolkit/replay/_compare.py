"""How far recipes are from each other on the same gradients. Replay is open-loop: it compares updates, not losses.

Legend: R recipes, S steps, P pairs of recipes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.frame import FrameWriter
from toolkit.replay._engine import ReplayResult, diverged_rows, read_tokens
from toolkit.replay._plan import MEMORY_BYTES, check_device, make_plan
from toolkit.replay._provenance import machine, provenance_of
from toolkit.replay._source import Source
from toolkit.replay._walk import Moment, Walk, Want
from traces.console import progress_bar
from traces.errors import GradreelError

COSINE, DISTANCE = "pairwise_update_cos", "pairwise_weight_distance"


class PairSums:
    """Inner products of updates and squared distances of weights, summed over the parameters of a role.

    `gram` is [S, R, R] (updates), `distance` [S, P] (weights after the step), `seen` how many tensors stand behind.
    """

    def __init__(self, steps: int, recipes: int) -> None:
        self.pairs = list(combinations(range(recipes), 2))
        self.gram = np.zeros((steps, recipes, recipes))
        self.distance = np.zeros((steps, len(self.pairs)))
        self.seen = np.zeros((steps, recipes), dtype=np.int64)

    def add(self, position: int, updates: list[Tensor | None], weights: list[Tensor]) -> None:
        """Add one parameter's step; a recipe without an update (diverged, no gradient) is left out."""
        flat = [None if u is None else u.reshape(-1).to(torch.float64) for u in updates]
        for i, left in enumerate(flat):
            if left is None:
                continue
            self.seen[position, i] += 1
            for j in range(i + 1):
                right = flat[j]
                if right is not None:
                    self.gram[position, i, j] += float(left @ right)
        for place, (i, j) in enumerate(self.pairs):
            if flat[i] is None or flat[j] is None:
                continue
            gap = weights[i].to(torch.float64) - weights[j].to(torch.float64)
            self.distance[position, place] += float(gap.square().sum())

    def rows(self, steps: tuple[int, ...], labels: list[str], has_weight: bool) -> Iterator[dict[str, Any]]:
        """Rows of the Frame, one or two per step and pair; `support` is the number of tensors compared."""
        for position, step in enumerate(steps):
            for place, (i, j) in enumerate(self.pairs):
                seen = int(min(self.seen[position, i], self.seen[position, j]))
                if not seen:
                    continue
                base = {"step": step, "recipe": f"{labels[i]} vs {labels[j]}", "support": float(seen), "unit": "1"}
                scale = np.sqrt(self.gram[position, i, i] * self.gram[position, j, j])
                product = self.gram[position, j, i]
                cosine = float(np.clip(product / scale, -1, 1)) if scale > 0 and np.isfinite(scale) else None
                flag = "" if cosine is not None else "undefined" if np.isfinite(scale) else "nonfinite"
                yield base | {"metric": COSINE, "value": cosine, "flag": flag}
                if has_weight:
                    yield base | {
                        "metric": DISTANCE,
                        "value": float(np.sqrt(self.distance[position, place])),
                        "unit": "weight",
                    }


def compare(
    trace: Any,
    recipes: Any,
    *,
    backend: str | None = None,
    match: str | None = None,
    gaps: str | None = None,
    lr: Any = None,
    params: Iterable[str] | None = None,
    steps: Any = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    seed: int = 0,
    device: str = "cpu",
    memory_bytes: int | str = MEMORY_BYTES,
) -> ReplayResult:
    """Pairwise distances of recipes on one trace, per step and role.

    Replay is open-loop: it compares updates, not losses.

    Arguments as in `replay`; at least two recipes. The Frame holds, with `recipe` = "A vs B":
    `pairwise_update_cos`, the cosine of the two updates taken as one vector over all parameters of the role, and
    `pairwise_weight_distance`, the L2 norm of the difference of their weights after the step (only with recorded
    weights). `support` is the number of tensors behind a value.
    """
    began = time.perf_counter()
    source = Source.of(trace)
    plan = make_plan(
        source,
        recipes,
        lr=lr,
        backend=backend,
        match=match,
        gaps=gaps,
        params=params,
        steps=steps,
        memory_bytes=memory_bytes,
    )
    labels = [entrant.label for entrant in plan.entrants]
    if len(labels) < 2:
        raise GradreelError(f"compare needs at least two recipes; given: {', '.join(labels)}")
    provenance = provenance_of("compare", source, plan, backend=backend, seed=seed, **machine(check_device(device)))
    position = {step: place for place, step in enumerate(plan.steps)}
    sums: dict[str, PairSums] = {}
    weighed: dict[str, bool] = {}
    writer = FrameWriter(out, constants={"run": source.id, "seed": seed})
    total = len(plan.steps) * provenance["parameters"]
    with writer, progress_bar("compare", total, "tensors", wanted=progress) as advance:
        tokens = read_tokens(source, plan)
        for group in plan.groups:
            walk = Walk(source, plan, group, tokens, want=Want(True, False, False), device=device, seed=seed)
            for moment in walk:
                role = moment.subject.info.role
                sums.setdefault(role, PairSums(len(plan.steps), len(labels)))
                weighed[role] = weighed.get(role, True) and moment.subject.has_weight
                _add(sums[role], position[moment.step], moment, labels)
                advance(1)
            for tracks in walk.tracks.values():
                writer.write(diverged_rows(tracks))
        for role, pair_sums in sums.items():
            writer.write(row | {"role": role} for row in pair_sums.rows(plan.steps, labels, weighed[role]))
        provenance["seconds"] = round(time.perf_counter() - began, 3)
        lazy = writer.close(provenance)
    return ReplayResult(source.trace, lazy, writer.path, provenance, list(plan.notes))


def _add(sums: PairSums, position: int, moment: Moment, labels: list[str]) -> None:
    by_label = {outcome.track.entrant.label: outcome for outcome in moment.outcomes if outcome.update is not None}
    updates = [by_label[label].update if label in by_label else None for label in labels]
    blank = torch.empty(0)
    weights = [
        after if label in by_label and (after := by_label[label].after) is not None else blank for label in labels
    ]
    sums.add(position, updates, weights)
