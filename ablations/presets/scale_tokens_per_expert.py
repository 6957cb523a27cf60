"""The axis of signal to noise: fewer or more tokens per expert and step, by the number of experts and by the batch."""

from ablations.presets._ablation import Ablation, Arm
from ablations.presets._sizes import MANY_TOKENS, as_mesh, few_tokens, on_gpu

#: Names say the mean tokens per expert and step; matrices are 64 wide, so at 128 the gradient can have full rank. Where
#: tokens are few, runs from different seeds lie far apart: they are longer, and there are more of them.
_CPU = {
    "2_tokens": {"steps": 2000, "warmup": 100, "seeds": (0, 1, 2, 3, 4, 5)},
    "128_tokens": MANY_TOKENS,
}
_RATES = {
    "sinkgd": (5e-4, 1e-3, 2e-3, 4e-3),
    "mesh": (2.5e-4, 5e-4, 1e-3, 2e-3),
    "adamw": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
}
_NANOWHALE = {
    "many_experts": {"model.config": {"n_routed_experts": 64, "num_experts_per_tok": 2}},
    "as_published": {},
}

ABLATION = Ablation(
    name="scale_tokens_per_expert",
    question="Does smoothing help where an expert sees few tokens a step, and no longer where it sees many?",
    decides=(
        "It is a matter of tokens per expert if mesh is better than sinkgd at 2 tokens, each at its own best rate, and "
        "the difference shrinks towards 128, where the gradient of a matrix can have full rank."
    ),
    baseline="sinkgd",
    found=(
        "With 2 tokens per expert (2000 steps, 6 seeds) mesh is better than sinkgd by 0.028 [0.014, 0.042] nats at "
        "its own best rate, by as much at the shared rate and by 0.029 [0.021, 0.038] with matched sizes: the order "
        "that the MESH paper reports. With 128 tokens (400 steps, 3 seeds) it does not appear: mesh is worse by "
        "0.019 [0.008, 0.030] at its own best rate and by 0.069 [0.027, 0.111] with matched sizes."
    ),
    arms={
        "sinkgd": Arm("sinkgd(alpha=1.0)", "stateless Sinkhorn"),
        "mesh": Arm("mesh", "momentum, then Sinkhorn"),
        "adamw": Arm("adamw(weight_decay=0.0)", "two moments"),
    },
    sizes={
        "cpu": few_tokens(settings=_CPU, grids=_RATES),
        "gpu": on_gpu(settings=_NANOWHALE),
        "paper": as_mesh(settings=_NANOWHALE),
    },
)
