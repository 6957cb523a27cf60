"""Label noise against a target that moves: what smoothing gains on the one it may lose on the other."""

from ablations.simulate._preset import Simulation, grid, rates
from ablations.simulate._world import World

SIMULATION = Simulation(
    name="noise_and_drift",
    question="With few tokens per expert, for which label noise and drift of the target does smoothing help?",
    decides=(
        "In each world alone, at tuned constant lr: the interval of the ratio of risks, averaged over the last quarter "
        "of the steps, lies above 1.1 (mesh helps) or below 1 / 1.1 (mesh harms)."
    ),
    worlds=grid(
        World(experts=4, schedule="constant"),
        tokens=(1, 8),
        noise=(0.01, 0.1, 1.0),
        drift=(0.0, 0.0003, 0.001, 0.003),
    ),
    arms={"stateless": "sinkgd(alpha=1.0)", "mesh": "mesh(beta=0.9)", "rms": "rms"},
    baseline="stateless",
    lr=rates(1e-4, 0.1, 12),
    seeds=(0, 1, 2, 3),
)
