"""Experts that are active in runs, or in single steps: does a memory of the last steps still help?"""

from ablations.simulate._preset import Simulation, grid, rates
from ablations.simulate._world import World

SIMULATION = Simulation(
    name="persistence",
    question="Does it matter for smoothing whether an expert's active steps come in runs, and what it does when idle?",
    decides=(
        "In each world alone, at tuned lr: intervals of the ratio of stateless Sinkhorn's risk beyond 1.1. The idle "
        "policy matters where the intervals of mesh and mesh_as_zero do not meet."
    ),
    worlds=grid(World(experts=4, activity=0.2), tokens=(1, 4), persistence=(0.0, 0.5, 0.9), drift=(0.0, 0.001)),
    arms={
        "stateless": "sinkgd(alpha=1.0)",
        "mesh": "mesh(beta=0.9)",
        "mesh_decay": "mesh(beta=0.9)+idle(decay)",
        "mesh_as_zero": "mesh(beta=0.9)+idle(as_zero)",
        "rms": "rms",
    },
    baseline="stateless",
    lr=rates(7e-4, 0.2, 12),
    seeds=(0, 1, 2, 3),
)
