"""Does the shape of the inputs change the picture: spectrum of their covariance, along the axes or turned."""

from ablations.simulate._preset import Simulation, grid, rates
from ablations.simulate._world import World

SIMULATION = Simulation(
    name="spectrum",
    question="Over which input spectra does smoothing help, and does Sinkhorn gain anything over mere scaling?",
    decides=(
        "In each world alone, at tuned lr: intervals of the ratio of stateless Sinkhorn's risk beyond 1.1. Sinkhorn "
        "gains over scaling where rms is worse than stateless."
    ),
    worlds=grid(World(experts=4), tokens=(1, 8, 64), spectrum=(0.0, 1.0, 2.0), basis=("axes", "rotated")),
    arms={
        "stateless": "sinkgd(alpha=1.0)",
        "mesh": "mesh(beta=0.9)",
        "rms": "rms",
        "momentum_then_rms": "momentum_then_rms",
    },
    baseline="stateless",
    lr=rates(3e-4, 0.2, 12),
    seeds=(0, 1, 2, 3),
)
