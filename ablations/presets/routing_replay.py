"""What an optimizer does through routing, and what it does through weights."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import as_mesh, few_tokens, on_gpu

ABLATION = Ablation(
    name="routing_replay",
    question="Does smoothing help through the experts' weights alone, or through the routing that it leads to?",
    decides=(
        "Through weights alone if mesh_recorded is as much better than sinkgd_recorded as mesh is than sinkgd, each at "
        "its own best rate: the recorded arms all train on the routing of one run of sinkgd. They are evaluated with "
        "their own routing, which their routers were not trained to choose, so only compare them with each other."
    ),
    baseline="sinkgd",
    arms={
        "sinkgd": Arm("sinkgd(alpha=1.0)", "stateless Sinkhorn; its routing at the shared rate is recorded"),
        "mesh": Arm("mesh", "momentum, then Sinkhorn"),
        "sinkgd_recorded": Arm("sinkgd(alpha=1.0)", "on the recorded routing", routing="recorded"),
        "mesh_recorded": Arm("mesh", "on the recorded routing", routing="recorded"),
        "adamw_recorded": Arm("adamw(weight_decay=0.0)", "on the recorded routing", routing="recorded"),
    },
    sizes={"cpu": few_tokens(), "gpu": on_gpu(), "paper": as_mesh()},
)
