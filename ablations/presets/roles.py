"""Which role of the model can do without state: stateless Sinkhorn on one role at a time, AdamW on the others."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import as_mesh, few_tokens, on_gpu


def _only(role: str) -> str:
    return f"sinkgd+adam_rest(2e-3, but={role})"


_SINK = "sage_sinkhorn+adam_rest(2e-3, but={})"

ABLATION = Ablation(
    name="roles",
    question="Which role needs optimizer state: where does stateless normalisation cost loss, and where does it not?",
    decides=(
        "A role needs state if the arm that is stateless there alone, at its own best rate for that role, is worse "
        "than adamw; it does not if its interval lies within the threshold."
    ),
    baseline="adamw",
    experts_only=False,
    arms={
        "adamw": Arm("adamw+adam_rest(2e-3)", "AdamW everywhere; the rate that is tried is the experts'"),
        "routed_expert": Arm(_only("routed_expert"), "stateless Sinkhorn on routed experts"),
        "attention": Arm(_only("attention"), "stateless Sinkhorn on attention"),
        "dense_ffn": Arm(_only("dense_ffn"), "stateless Sinkhorn on the dense layer"),
        "router": Arm(_SINK.format("router"), "stateless Sinkhorn on the router"),
        "embedding": Arm(_SINK.format("embedding"), "SAGE on the embedding, which is the head too"),
    },
    sizes={"cpu": few_tokens(), "gpu": on_gpu(), "paper": as_mesh()},
)
