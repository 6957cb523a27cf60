"""How a float32 result is stored in a narrower weight: see `toolkit.kernels._rounding`, which fused kernels share."""

from toolkit.kernels._rounding import ROUNDINGS, dithered_bf16, rounded, stochastic_bf16

__all__ = ["ROUNDINGS", "dithered_bf16", "rounded", "stochastic_bf16"]
