"""The table of the SkewAdam paper: six optimizers, each as a whole."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import as_skewadam, few_tokens, on_gpu

_RATES = {"muon": (5e-3, 1.5e-2, 4.5e-2), "lion": (1e-4, 3e-4, 1e-3), "galore": (1.5e-3, 5e-3, 1.5e-2)}

ABLATION = Ablation(
    name="skewadam_table",
    question="At its own best rate, does SkewAdam reach a lower loss than AdamW, Muon, Lion, Adafactor and GaLore?",
    decides=(
        "The paper's order holds if every other arm is worse than skewadam at its own best rate; a difference at the "
        "shared rate alone is one of effective rate."
    ),
    baseline="skewadam",
    threshold=0.01,
    experts_only=False,
    arms={
        "skewadam": Arm("skewadam", "tiers of state, the corrected rule"),
        "adamw": Arm("adamw", "two moments"),
        "muon": Arm("muon", "orthogonalised momentum, Adam on the rest"),
        "lion": Arm("lion", "signs of momentum"),
        "adafactor": Arm("adafactor", "a factored second moment"),
        "galore": Arm("galore", "two moments of a projection"),
    },
    sizes={
        "cpu": few_tokens(grid=(1e-3, 3e-3, 9e-3), shared_lr=3e-3, grids=_RATES),
        "gpu": on_gpu(grids=_RATES),
        "paper": as_skewadam(),
    },
)
