"""Momentum then normalisation, or normalisation then momentum, on routed experts."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import as_mesh, few_tokens, on_gpu

#: Each holds the arm's best rate between two others, as first runs showed it.
_GRIDS = {
    **dict.fromkeys(("momentum_last", "longer_last", "sink_v"), (3e-4, 1e-3, 3e-3)),
    **dict.fromkeys(("sinkgd", "sign_first"), (1e-3, 2e-3, 4e-3)),
    "longer_first": (2.5e-4, 5e-4, 1e-3),
}

ABLATION = Ablation(
    name="order",
    question="On routed experts, must smoothing come before normalisation, or does it help as well behind it?",
    decides=(
        "Order matters if momentum_first is better than its twin momentum_last at the same beta, each at its own best "
        "rate and with matched sizes; sinkgd has no momentum at all."
    ),
    baseline="momentum_last",
    found=(
        "3 seeds: momentum before normalisation is better than behind it by 0.021 [0.006, 0.036] nats, each at its "
        "own best rate, and with a beta of 0.97 by 0.014 [0.009, 0.019]; with matched sizes of weight change they "
        "are equal (0.001 [-0.005, 0.007]). So in this regime the order acts through the size of the steps that it "
        "allows."
    ),
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
