"""Five rules on 24x24 linear experts, from one token a step to many: does smoothing first help, and where?"""

from ablations.simulate._preset import Simulation, grid, rates

SIMULATION = Simulation(
    name="linear_experts_first_look",
    question="On 24x24 linear experts, does smoothing before normalisation help with few tokens, and stop with many?",
    decides=(
        "Yes where mesh is better than stateless at tuned lr with 1 token and not with 64, while sign and "
        "normalise_then_momentum are better in neither."
    ),
    worlds=grid(tokens=(1, 8, 64), activity=(1.0, 0.2)),
    arms={
        "stateless": "sinkgd(alpha=1.0)",
        "sign": "sinkgd(alpha=1.0)+sign_only",
        "mesh": "mesh(beta=0.9)",
        "mesh_as_zero": "mesh(beta=0.9)+idle(as_zero)",
        "sign_of_momentum": "mesh(beta=0.9)+sign_only",
        "normalise_then_momentum": "normalise_then_momentum(beta=0.9)",
        "adam": "adamw(weight_decay=0.0)",
        "sgd": "sgd",
        "sgd_momentum": "sgd(momentum=0.9)",
        "rms": "rms",
        "momentum_then_rms": "momentum_then_rms",
        "muon": "muon(momentum=0.9,nesterov=False,weight_decay=0.0)",
    },
    baseline="stateless",
    lr=rates(5e-4, 0.2, 16),
    grids={"sgd": rates(2e-3, 1.0, 16), "sgd_momentum": rates(2e-4, 0.1, 16), "muon": rates(2e-3, 1.0, 16)},
    seeds=(0, 1, 2, 3, 4, 5),
)
