"""Simple noise scale of each expert, in routed tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from toolkit.metrics._experts import dot, expert_ids, experts_of, info_of, tokens_of
from toolkit.metrics._metric import Measure, Metric, Subject
from traces.views import StepView


@dataclass
class Estimates:
    """Summed unbiased estimates of the signal |G|^2 and the noise tr(Sigma), and the steps behind them, all [E]."""

    signal: np.ndarray
    noise: np.ndarray
    steps: np.ndarray


def init(subject: Subject) -> Estimates:
    """No step seen."""
    return Estimates(*(np.zeros(subject.experts) for _ in range(3)))


def update(state: Estimates, view: StepView) -> Iterable[Measure]:
    """Take in one step, for the experts with tokens in at least two of its micro-steps."""
    tokens = _tokens(view)
    if view.micro_norms is None or view.gradient is None or tokens is None:
        return ()
    norms = _wide(view.micro_norms, view)
    if view.micro_tokens is not None:
        parts = _wide(view.micro_tokens, view)
    else:
        used = norms > 0
        parts = np.where(used, tokens / np.maximum(used.sum(axis=0), 1), 0.0)
    big = dot(view, "gradient", "gradient")
    used = (parts > 0) & np.isfinite(norms)
    micro_steps = used.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(used, 1 / parts, 0.0).sum(axis=0) / micro_steps
        small_square = np.where(used, norms / parts**2, 0.0).sum(axis=0) / micro_steps
        big_square = big / tokens**2
        noise = (small_square - big_square) / (inverse - 1 / tokens)
        signal = big_square - noise / tokens
    good = (micro_steps >= 2) & np.isfinite(noise) & np.isfinite(signal) & ~np.isnan(norms).any(axis=0)
    # A step counts by its tokens squared: the estimates are means per token, the recorded gradients are sums.
    weight = np.where(good, tokens, 0.0) ** 2
    state.signal[good] += weight[good] * signal[good]
    state.noise[good] += weight[good] * noise[good]
    state.steps += good
    return ()


def _tokens(view: StepView) -> np.ndarray | None:
    """Routed tokens [E]; for a parameter of the backbone all tokens of the step, if they were recorded."""
    tokens = tokens_of(view)
    if tokens is None and view.micro_tokens is not None:
        return _wide(view.micro_tokens, view).sum(axis=0)
    if tokens is None and experts_of(info_of(view)) == 1 and view.scalars.get("tokens"):
        return np.array([float(view.scalars["tokens"])])
    return tokens


def _wide(values: np.ndarray, view: StepView) -> np.ndarray:
    """[M, e], [M, E] or [M] -> float64 [M, E]; NaN for experts that were not recorded."""
    array = np.asarray(values, dtype=np.float64)
    array = array[:, None] if array.ndim == 1 else array
    experts, ids = experts_of(info_of(view)), expert_ids(view)
    if array.shape[1] == experts or ids is None:
        return array
    out = np.full((len(array), experts), np.nan)
    out[:, ids] = array
    return out


def result(state: Estimates) -> Iterable[Measure]:
    """Ratio of the two sums; null without micro-norms, and where the estimated signal is not positive."""
    value = np.full(state.steps.shape, np.nan)
    good = (state.steps > 0) & (state.signal > 0)
    value[good] = state.noise[good] / state.signal[good]
    yield Measure(value, support=state.steps.copy())


METRIC = Metric(
    name="gradient_noise_scale",
    group="gradient",
    needs=("gradient", "micro_norms"),
    scope="parameter",
    unit="tokens",
    formula=(
        "tr(Sigma) / |G|^2; per step: tr(Sigma) = (mean_m |g_m|^2/b_m^2 - |g|^2/B^2) / (mean_m 1/b_m - 1/B), "
        "|G|^2 = |g|^2/B^2 - tr(Sigma)/B; both summed over steps, weighted by B^2, before dividing"
    ),
    citation="McCandlish et al. 2018, arXiv 1812.06162, appendix A.1 (two batch sizes)",
    init=init,
    update=update,
    result=result,
    doc=(
        "B = tokens routed to the expert in the step, b_m in micro-step m (equal shares of B where only B is known); g "
        "and g_m are sums over tokens up to one common factor, which cancels. Micro-steps without tokens do not count; "
        "a step needs two with. Can be negative by chance. Support: steps."
    ),
)
