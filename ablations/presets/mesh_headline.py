"""The table of the MESH paper: whole optimizers, from AdamW to no state at all."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import as_mesh, few_tokens, on_gpu

ABLATION = Ablation(
    name="mesh_headline",
    question="How close to AdamW do optimizers come that keep little or no state, each as a whole?",
    decides=(
        "The paper's order holds if, each at its own best rate, adamw is better than mesh and mesh than sage_sinkhorn; "
        "the full-state diagnostics say whether what is missing is the experts' state."
    ),
    baseline="sage_sinkhorn",
    threshold=0.01,
    experts_only=False,
    arms={
        "sage_sinkhorn": Arm("sage_sinkhorn", "SAGE on vocabulary, stateless Sinkhorn elsewhere"),
        "adamw": Arm("adamw", "two moments everywhere"),
        "sinkgd": Arm("sinkgd(alpha=1.0)", "stateless Sinkhorn on matrices, Adam on the rest"),
        "mesh": Arm("mesh", "momentum in the experts' gradient buffer"),
        "mesh_b": Arm("mesh_b", "the same with a coarse inverse RMS behind it"),
        "full_momentum": Arm("mesh_full_state(experts=momentum)", "the momentum as state"),
        "full_adam": Arm("mesh_full_state(experts=adam)", "Adam on experts alone"),
        "sinkhorn_of_adam": Arm("mesh_full_state(experts=sinkhorn_of_adam)", "Sinkhorn of Adam's update on experts"),
    },
    sizes={
        "cpu": few_tokens(grid=(5e-4, 1.5e-3, 4.5e-3), shared_lr=1.5e-3),
        "gpu": on_gpu(),
        "paper": as_mesh(),
    },
)
