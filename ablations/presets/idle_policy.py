"""What an expert does in a step in which it got no token."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import as_mesh, few_tokens, on_gpu

ABLATION = Ablation(
    name="idle_policy",
    question="Should an expert without tokens stay where it is, let its state decay, or move on with its momentum?",
    decides=(
        "A policy is better where it beats as_zero, which is what stacked experts do without one, each at its own best "
        "rate; the lr grid also shows which policy forgives a rate that is too high."
    ),
    baseline="mesh_as_zero",
    found=(
        "3 seeds: nothing is decided at best rates; skipping leads by 0.013 [-0.006, 0.031] nats. It is seed 0 "
        "alone that shows how as_zero meets a rate of 2e-3: 2.559 nats, against 2.369 where idle experts are "
        "skipped."
    ),
    arms={
        "mesh_as_zero": Arm("mesh(idle=as_zero)", "moves on at full size"),
        "mesh_skip": Arm("mesh(idle=skip)", "neither moves nor forgets"),
        "mesh_decay": Arm("mesh(idle=decay)", "forgets, and does not move"),
        "adamw_as_zero": Arm("adamw(weight_decay=0.0)", "AdamW moving on, as in torch"),
        "adamw_skip": Arm("adamw(weight_decay=0.0, idle=skip)", "AdamW that neither moves nor forgets"),
        "sinkgd": Arm("sinkgd(alpha=1.0)", "has nothing to move on with"),
    },
    sizes={
        "cpu": few_tokens(grid=(3e-4, 1e-3, 2e-3, 4e-3), grids={"mesh_as_zero": (1e-4, 3e-4, 1e-3, 2e-3)}),
        "gpu": on_gpu(),
        "paper": as_mesh(),
    },
)
