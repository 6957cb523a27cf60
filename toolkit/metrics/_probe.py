"""What the probe metrics share: the experts that a fixed probe batch would be routed to, step after step.

Legend: N probe tokens, K slots. The batch never changes, so tokens can be followed by their place in it.
"""

from __future__ import annotations

import numpy as np

from traces.errors import GradreelError
from traces.views import StepView


def probe_ids(view: StepView) -> np.ndarray | None:
    """Expert ids of the probe tokens that are not padding, int32 [N, K], sorted by row, -1 (dropped) first."""
    if view.probe is None:
        return None
    ids = np.asarray(view.probe.topk_expert_ids)[~np.asarray(view.probe.is_pad, dtype=bool)]
    return np.sort(ids.astype(np.int32), axis=1)


def same_batch(left: np.ndarray, right: np.ndarray, step: int) -> None:
    """Raise GradreelError where two probes cannot be of the same batch."""
    if left.shape != right.shape:
        raise GradreelError(
            f"the probe of step {step} has {right.shape[0]} tokens and {right.shape[1]} slots, earlier ones "
            f"{left.shape[0]} and {left.shape[1]}; record one fixed probe batch"
        )


def common_experts(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per token, int64 [N]: experts in both selections, in the left, in the right."""
    both = ((left[:, :, None] == right[:, None, :]) & (left[:, :, None] >= 0)).any(axis=2).sum(axis=1)
    return both, (left >= 0).sum(axis=1), (right >= 0).sum(axis=1)
