"""How long to smooth and how often to sweep: beta and L of MESH, and L of stateless Sinkhorn."""

from ablations.simulate._preset import Simulation, grid, rates
from ablations.simulate._world import World

SIMULATION = Simulation(
    name="beta_and_sweeps",
    question="Which beta and how many sweeps reach the lowest risk, with few tokens per expert and with many?",
    decides=(
        "In each world alone, against stateless Sinkhorn of 5 sweeps at tuned lr: intervals of the ratio beyond 1.1. "
        "Two values of beta or L differ where their intervals do not meet."
    ),
    worlds=grid(World(experts=4), tokens=(1, 4, 32)),
    arms={
        "stateless": "sinkgd(alpha=1.0)",
        "stateless_L1": "sinkgd(alpha=1.0,sweeps=1)",
        "stateless_L2": "sinkgd(alpha=1.0,sweeps=2)",
        "stateless_L10": "sinkgd(alpha=1.0,sweeps=10)",
        "mesh_0.5": "mesh(beta=0.5)",
        "mesh_0.8": "mesh(beta=0.8)",
        "mesh_0.9": "mesh(beta=0.9)",
        "mesh_0.95": "mesh(beta=0.95)",
        "mesh_0.98": "mesh(beta=0.98)",
        "mesh_0.9_L1": "mesh(beta=0.9,sweeps=1)",
        "mesh_0.9_L10": "mesh(beta=0.9,sweeps=10)",
    },
    baseline="stateless",
    lr=rates(2e-4, 0.1, 12),
    seeds=(0, 1, 2, 3),
)
