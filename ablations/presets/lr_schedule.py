"""Whether the schedule decides how much smoothing helps: noise counts most where the rate never falls."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import as_mesh, few_tokens, on_gpu

_SCHEDULES = {name: {"schedule": name} for name in ("cosine", "constant", "wsd")}

ABLATION = Ablation(
    name="lr_schedule",
    question="Does smoothing on routed experts help more under a schedule that keeps the rate up than under a cosine?",
    decides=(
        "The schedule matters if mesh is better than sinkgd under one schedule, each at its own best rate there, and "
        "not under another."
    ),
    baseline="sinkgd",
    arms={
        "sinkgd": Arm("sinkgd(alpha=1.0)", "stateless Sinkhorn"),
        "mesh": Arm("mesh", "momentum, then Sinkhorn"),
        "adamw": Arm("adamw(weight_decay=0.0)", "two moments"),
    },
    sizes={
        "cpu": few_tokens(settings=_SCHEDULES),
        "gpu": on_gpu(settings=_SCHEDULES),
        "paper": as_mesh(settings=_SCHEDULES),
    },
)
