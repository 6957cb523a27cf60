"""Chains that several recipes share."""

from __future__ import annotations

from toolkit.stages import Chain, chain
from toolkit.stages._make import stage


def adam_chain(
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    rounding: str = "stochastic",
    lr_scale: float = 1.0,
) -> Chain:
    """AdamW in torch's order of operations (arXiv 1711.05101)."""
    return chain(
        stage("second_moment", beta=betas[1], eps=eps),
        stage("ema", beta=betas[0]),
        stage("unbias", beta=betas[0]),
        stage("apply", weight_decay=weight_decay, rounding=rounding),
        lr_scale=lr_scale,
    )


def sinkhorn_chain(
    *,
    sweeps: int = 5,
    compat: str = "paper",
    weight_decay: float = 0.0,
    rounding: str = "stochastic",
    lr_scale: float = 1.0,
) -> Chain:
    """Stateless Sinkhorn normalisation of each matrix (arXiv 2502.06742)."""
    return chain(
        stage("sr_sinkhorn", sweeps=sweeps, compat=compat),
        stage("apply", weight_decay=weight_decay, rounding=rounding),
        lr_scale=lr_scale,
    )


def sage_chain(
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    rounding: str = "stochastic",
    lr_scale: float = 1.0,
) -> Chain:
    """SAGE for vocabulary matrices (arXiv 2604.07663)."""
    return chain(
        stage("sage", beta1=betas[0], beta2=betas[1], eps=eps),
        stage("apply", weight_decay=weight_decay, rounding=rounding),
        lr_scale=lr_scale,
    )


def stateless_vector_chain(*, rounding: str = "stochastic", lr_scale: float = 1.0) -> Chain:
    """The gradient over its RMS, for 1-D parameters (arXiv 2608.04407)."""
    return chain(stage("rms_normalise"), stage("apply", rounding=rounding), lr_scale=lr_scale)
