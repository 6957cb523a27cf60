"""Momentum then normalisation, or normalisation then momentum, on routed experts."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import as_mesh, few_tokens, on_gpu

#: Momentum behind the normalisation averages steps, so that their size shrinks with the noise.
_GRIDS = {
    "momentum_last": (1e-3, 3e-3, 9e-3),
    "longer_last": (1e-3, 3e-3, 9e-3),
    "sink_v": (1e-3, 3e-3, 9e-3),
    "sinkgd": (1e-3, 2e-3, 4e-3),
}

ABLATION = Ablation(
    name="order",
    question="On routed experts, must smoothing come before normalisation, or does it help as well behind it?",
    decides=(
        "Order matters if momentum_first is better than its twin momentum_last at the same beta, each at its own best "
        "rate and with matched sizes; sinkgd has no momentum at all."
    ),
    baseline="momentum_last",
    arms={
        "momentum_last": Arm("mesh+normalise_first", "Sinkhorn, then momentum of 0.9"),
        "momentum_first": Arm("mesh", "momentum of 0.9, then Sinkhorn"),
        "sinkgd": Arm("sinkgd(alpha=1.0)", "no momentum"),
        "longer_last": Arm("mesh(beta=0.97)+normalise_first", "Sinkhorn, then momentum of 0.97"),
        "longer_first": Arm("mesh(beta=0.97)", "momentum of 0.97, then Sinkhorn"),
        "sign_first": Arm("mesh+sign_only", "momentum of 0.9, then signs"),
        "sink_v": Arm("sink_v", "the signal-to-noise form of momentum_last"),
    },
    sizes={
        "cpu": few_tokens(grids=_GRIDS),
        "gpu": on_gpu(),
        "paper": as_mesh(),
    },
)
