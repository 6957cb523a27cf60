"""The peak of an optimizer's step in closed form: the largest temporaries that the step of one parameter needs.

Original code: `Recipe.temporaries["original"]` float32 tensors of the largest matrix; the originals step experts as
matrices of their own, and nothing in pieces.

Ours, for one parameter, with p the elements that are stepped at once: all of it, or 2^24 elements of a stack of experts
or of an elementwise chain:

- t p wide elements (float32; float64 for float64 parameters), t being 1 for elementwise chains and
  `Recipe.temporaries["ours"]` for others. A projection whose rank is below the shorter side needs less than that:
  APOLLO t r / k (at least 1) for rank r and shorter side k of an m x n matrix; GaLore 1 + (t - 1) r / k, or
  1 + k/m + k/n where it takes singular vectors.
- A sixteenth of that more where an RMS is taken, a thirty-second for signs: they are found piece by piece.
- p wide elements more for a narrow parameter: its widened gradient.
- Rounding a bfloat16 weight comes last, beside the update alone: 38 bytes for each of up to 2^20 elements.
- Sinkhorn in its torch form, the one that runs on a GPU, has beside its result 40 bytes for each element of one matrix
  (of as many as have 2^20 elements), since it works in float64.

The largest of the three moments counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from toolkit.recipes import Recipe
from toolkit.stages import Chain, Stage
from traces.errors import GradreelError
from traces.views import ParamInfo

ROUNDED_AT_ONCE = 1 << 20
ROUNDING_BYTES = 38
SINKHORN_BYTES = 40
#: Stages that look at a matrix piece by piece, and how large a piece is.
_IN_PIECES = {"rms_clip": 1 / 16, "lion": 1 / 32, "sage": 1 / 32, "sign": 1 / 32}
#: cuBLAS and cuBLASLt take 32 MiB each on Hopper, once, and keep them. No tensor, so no tracker sees them.
HOPPER_WORKSPACE_BYTES = 64 << 20


@dataclass(frozen=True)
class StepPeak:
    """`bytes` of temporaries at the peak of a step, how many float32 tensors of the parameter's size that is
    (`temporaries`), and the parameter it is reached at (`where`)."""

    bytes: int
    temporaries: float
    where: str


def step_peak(
    recipe: Recipe, params: Iterable[ParamInfo], *, original: bool = False, sinkhorn: str = "torch"
) -> StepPeak:
    """The most that temporaries of one step take, over all `params` (a shape table; tied ones count once).

    `original`: the original code's step in place of this project's. `sinkhorn`: "torch" as on a GPU, or "fused" as on
    CPUs, which needs nothing beside its result. Errors: GradreelError where `params` is empty or the recipe has no row.
    """
    if sinkhorn not in ("torch", "fused"):
        raise GradreelError(f"sinkhorn is {sinkhorn!r}; allowed: torch, fused")
    best: StepPeak | None = None
    for info in params:
        if info.tied_to is not None:
            continue
        size = _original(recipe, info) if original else _ours(recipe, info, sinkhorn)
        if best is None or size > best.bytes:
            best = StepPeak(size, size / (4 * max(1, _matrix_elements(info))), info.name)
    if best is None:
        raise GradreelError("step_peak got no parameters; give a shape table with at least one")
    return best


def _matrix_elements(info: ParamInfo) -> int:
    return info.numel // _experts(info)


def _experts(info: ParamInfo) -> int:
    return 1 if info.expert_axis is None else max(1, info.shape[info.expert_axis])


def _original(recipe: Recipe, info: ParamInfo) -> int:
    recipe.chain_for(info)
    return round(recipe.temporaries["original"] * 4 * _matrix_elements(info))


def _ours(recipe: Recipe, info: ParamInfo, sinkhorn: str) -> int:
    from toolkit.recipes._stepper import compute_dtype

    chain, wide = recipe.chain_for(info), compute_dtype(info).itemsize
    part = _stepped_at_once(chain, info)
    held = _temporaries(recipe, chain, info)
    narrow = info.dtype in ("bfloat16", "float16")
    peaks = [wide * part * held * (1 + max((_IN_PIECES.get(s.name, 0.0) for s in _stages(chain)), default=0.0))]
    if info.dtype == "bfloat16" and chain.stages[-1].options.get("rounding") != "nearest":
        peaks.append(wide * part * min(held, 1.0) + ROUNDING_BYTES * min(part, ROUNDED_AT_ONCE))
    if sinkhorn == "torch" and info.matrix_axes is not None and any(s.name == "sr_sinkhorn" for s in _stages(chain)):
        matrix = info.numel if _joins(chain) else _matrix_elements(info)
        peaks.append(wide * part + SINKHORN_BYTES * min(part, max(matrix, ROUNDED_AT_ONCE)))
    return round(max(peaks) + (wide * part if narrow else 0))


def _stepped_at_once(chain: Chain, info: ParamInfo) -> int:
    """Elements of the largest part that `Stepper` steps at once."""
    from toolkit.recipes._stepper import BLOCK, couples_experts, is_elementwise

    each, experts = max(1, _matrix_elements(info)), _experts(info)
    if info.expert_axis is not None:
        return info.numel if any(map(couples_experts, chain)) else min(experts, max(1, BLOCK // each)) * each
    return min(info.numel, BLOCK) if is_elementwise(chain) else info.numel


def _stages(stages: Iterable[Stage]) -> Iterator[Stage]:
    """All stages, those inside combinators too."""
    for stage in stages:
        yield stage
        yield from _stages(stage.options.get("inner", ()))


def _joins(chain: Chain) -> bool:
    """Whether a stage sees all experts of a stack as one matrix."""
    return any(getattr(s.options.get("view"), "joins_experts", False) for s in _stages(chain))


def _rank(stage: Stage) -> int | None:
    projector = stage.options.get("projector")
    return stage.options.get("rank") if projector is None else projector.rank


def _temporaries(recipe: Recipe, chain: Chain, info: ParamInfo) -> float:
    """How many wide tensors of the part's size its chain holds at once."""
    from toolkit.recipes._stepper import is_elementwise

    declared = recipe.temporaries["ours"]
    if is_elementwise(chain):
        return min(declared, 1.0)
    if info.matrix_axes is None:
        return 1.0
    rows, columns = (info.shape[axis] for axis in info.matrix_axes)
    short = min(rows, columns)
    rank = next((r for stage in chain if (r := _rank(stage)) is not None), None)
    if rank is None or short <= rank:
        return declared
    if any("projector" in s.options for s in chain):
        return 1.0 + max(short / rows + short / columns, (declared - 1.0) * rank / short)
    return max(1.0, declared * rank / short)
