"""The tier ablation of the SkewAdam paper: which tier needs which state."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import as_skewadam, few_tokens, on_gpu

ABLATION = Ablation(
    name="skewadam_tiers",
    question="Does it cost loss to keep momentum from routed experts, and does a full second moment help the router?",
    decides=(
        "A tier's state is needed if giving it or taking it away changes the loss by the threshold, each arm at its "
        "own best rate; the paper reports four arms within 0.7 of a perplexity of 108."
    ),
    baseline="full",
    experts_only=False,
    found=(
        "3 seeds: no tier's state makes a difference that is decided, at the shared rate or at best rates, as the "
        "paper found on its scale; the intervals are 0.015 to 0.06 nats wide to either side, so small effects stay "
        "open."
    ),
    arms={
        "full": Arm("skewadam", "the rule as it is: experts without momentum, a full router"),
        "expert_momentum": Arm("skewadam(tiers=expert_momentum)", "experts with momentum too"),
        "factored_router": Arm("skewadam(tiers=factored_router)", "a factored router"),
        "uniform": Arm("skewadam(tiers=uniform)", "every tier as the backbone"),
    },
    sizes={
        "cpu": few_tokens(grid=(1e-3, 2e-3, 4e-3, 8e-3), shared_lr=2e-3),
        "gpu": on_gpu(),
        "paper": as_skewadam(),
    },
)
