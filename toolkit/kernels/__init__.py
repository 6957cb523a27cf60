"""The heavy arithmetic, one op per file, with a slow truth beside each fast form.

The modules named here import torch only inside their functions.
"""

from toolkit.kernels.adamw_step import adamw_step
from toolkit.kernels.mesh_step import mesh_step
from toolkit.kernels.newton_schulz import newton_schulz
from toolkit.kernels.sign_step import sign_step
from toolkit.kernels.skewadam_step import SkewAdamRule, SkewAdamState, skewadam_step
from toolkit.kernels.sr_sinkhorn import (
    SinkhornResult,
    sr_sinkhorn,
    sr_sinkhorn_apply,
    sr_sinkhorn_apply_each,
    sr_sinkhorn_run,
)
from toolkit.kernels.step_statistics import StepStatistics, step_statistics

__all__ = [
    "SinkhornResult",
    "SkewAdamRule",
    "SkewAdamState",
    "StepStatistics",
    "adamw_step",
    "mesh_step",
    "newton_schulz",
    "sign_step",
    "skewadam_step",
    "sr_sinkhorn",
    "sr_sinkhorn_apply",
    "sr_sinkhorn_apply_each",
    "sr_sinkhorn_run",
    "step_statistics",
]
