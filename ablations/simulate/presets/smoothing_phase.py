"""Where smoothing before normalisation helps: tokens per expert against the share of steps an expert is active."""

from ablations.simulate._preset import Simulation, grid, rates
from ablations.simulate._world import World

SIMULATION = Simulation(
    name="smoothing_phase",
    question="For which tokens per expert and which activity does mesh reach a lower risk than stateless Sinkhorn?",
    decides=(
        "In each world alone, at tuned lr: mesh helps where the interval of the ratio of risks lies above 1.1, harms "
        "where it lies below 1 / 1.1. The control rms (no memory, no Sinkhorn) says how much of it needs smoothing."
    ),
    worlds=grid(World(experts=4), tokens=(1, 2, 4, 8, 16, 32, 96), activity=(1.0, 0.5, 0.2, 0.1)),
    arms={
        "stateless": "sinkgd(alpha=1.0)",
        "mesh": "mesh(beta=0.9)",
        "mesh_as_zero": "mesh(beta=0.9)+idle(as_zero)",
        "rms": "rms",
    },
    baseline="stateless",
    lr=rates(7e-4, 0.2, 12),
)
