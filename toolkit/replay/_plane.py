"""Where the weights go under each recipe, seen in one plane. Replay is open-loop: it compares updates, not losses.

The plane of a role goes through its weights at the first step and holds two displacements: the first axis points to
where the first recipe ends, the second is what of the second recipe's displacement stands at right angles to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.frame import FrameWriter
from toolkit.replay._engine import ReplayResult, diverged_rows, read_tokens
from toolkit.replay._plan import MEMORY_BYTES, Plan, Subject, check_device, make_plan
from toolkit.replay._provenance import machine, provenance_of
from toolkit.replay._source import Source
from toolkit.replay._walk import Walk, Want
from traces.console import progress_bar
from traces.errors import GradreelError

ALONG, ACROSS, OFF = "plane_along", "plane_across", "plane_off"


class Plane:
    """Sums over the parameters of a role. Legend: S steps, R recipes.

    `inner` [S, R, 2] are inner products of displacements with the two final ones, `norm2` [S, R] squared norms, `ends`
    [2, 2] inner products of the two final displacements, `seen` [S, R] the tensors behind a value.
    """

    def __init__(self, steps: int, recipes: int) -> None:
        self.inner = np.zeros((steps, recipes, 2))
        self.norm2 = np.zeros((steps, recipes))
        self.seen = np.zeros((steps, recipes), dtype=np.int64)
        self.ends = np.zeros((2, 2))

    def span(self, ends: Tensor) -> None:
        """Add one parameter's final displacements under the first two recipes, [2, numel]."""
        self.ends += (ends @ ends.T).numpy()

    def add(self, place: int, way: Tensor, ends: Tensor) -> None:
        """Add one parameter's displacements at a step, [R, numel], given its `ends` [2, numel]."""
        self.inner[place] += (way @ ends.T).numpy()
        self.norm2[place] += way.square().sum(-1).numpy()
        self.seen[place] += 1

    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Along, across and off the plane [S, R]; `across` is 0 where the two ends lie in one direction."""
        first = np.sqrt(self.ends[0, 0])
        with np.errstate(divide="ignore", invalid="ignore"):
            along = np.where(first > 0, self.inner[..., 0] / first, 0.0)
            shared = self.ends[0, 1] / first if first > 0 else 0.0
            rest = self.ends[1, 1] - shared**2
            flat = not rest > 1e-12 * self.ends[1, 1]
            across = np.zeros_like(along) if flat else (self.inner[..., 1] - shared * along) / np.sqrt(rest)
        off = np.sqrt(np.clip(self.norm2 - along**2 - across**2, 0.0, None))
        return along, across, off

    def rows(self, steps: Sequence[int], labels: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Rows of the Frame, three per step and recipe; `support` is the number of tensors."""
        for name, values in zip((ALONG, ACROSS, OFF), self.coordinates(), strict=True):
            for place, step in enumerate(steps):
                for number, label in enumerate(labels):
                    value = float(values[place, number])
                    finite = np.isfinite(value)
                    yield {
                        "step": step,
                        "recipe": label,
                        "metric": name,
                        "value": value if finite else None,
                        "flag": "" if finite else "nonfinite",
                        "unit": "weight",
                        "support": float(self.seen[place, number]),
                    }


def weight_plane(
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
    """The way of the weights under each recipe, projected onto the plane of two displacements, per step and role.

    Replay is open-loop: it compares updates, not losses.

    Arguments as in `replay`; the first two recipes span the plane, in which their ends lie exactly. The Frame holds
    `plane_along`, `plane_across` and `plane_off` in units of the weight: the coordinates of W_t - W_0 in the plane,
    taken as one vector over all parameters of the role, and its distance from the plane. The squares of the three add
    up to the squared displacement. The trace is read twice: the ends must be known before anything is projected onto
    them. Errors: GradreelError for fewer than two recipes or a parameter without recorded weights.
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
        raise GradreelError(f"a plane needs at least two recipes; given: {', '.join(labels)}")
    if plan.lacks_weight:
        raise GradreelError(f"parameter {plan.lacks_weight[0]!r} has no recorded weight at step {plan.steps[0]}")
    provenance = provenance_of(
        "weight_plane", source, plan, backend=backend, seed=seed, **machine(check_device(device))
    )
    shown = [step for step in plan.steps if step not in source.skipped]
    planes: dict[str, Plane] = {}
    writer = FrameWriter(out, constants={"run": source.id, "seed": seed})
    total = 2 * len(shown) * provenance["parameters"]
    with writer, progress_bar("plane", total, "tensors", wanted=progress) as advance:
        tokens = read_tokens(source, plan)
        for subject in plan.subjects:
            plane = planes.setdefault(subject.info.role, Plane(len(shown), len(labels)))

            def way(only: Plan = plan, one: Subject = subject) -> Iterator[Tensor]:
                walk = Walk(source, only, (one,), tokens, want=Want(False, False, False), device=device, seed=seed)
                for displaced in _displacements(walk):
                    advance(1)
                    yield displaced
                writer.write(diverged_rows(walk.tracks[one.info.name]) if only is plan else ())

            # The first two recipes alone go first: what spans the plane is where they end.
            *_, ends = way(replace(plan, entrants=plan.entrants[:2]))
            plane.span(ends)
            for place, displaced in enumerate(way()):
                plane.add(place, displaced, ends)
        for role, plane in planes.items():
            writer.write(row | {"role": role} for row in plane.rows(shown, labels))
        provenance["seconds"] = round(time.perf_counter() - began, 3)
        lazy = writer.close(provenance)
    return ReplayResult(source.trace, lazy, writer.path, provenance, list(plan.notes))


def _displacements(walk: Walk) -> Iterator[Tensor]:
    """W_t - W_0 of the walk's one parameter after each step, [R, numel] float64; NaN for a recipe that diverged."""
    ((_, tracks),) = walk.tracks.items()
    start = tracks[0].weight.detach().reshape(-1).to(torch.float64, copy=True).cpu()
    for _ in walk:
        rows = [t.weight.detach().reshape(-1).to(torch.float64).cpu() - start for t in tracks]
        yield torch.stack(
            [row if t.alive else torch.full_like(row, torch.nan) for t, row in zip(tracks, rows, strict=True)]
        )
