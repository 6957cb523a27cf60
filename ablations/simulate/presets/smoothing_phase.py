"""Where smoothing before normalisation helps: tokens per expert against the share of steps an expert is active."""

from ablations.simulate._preset import Simulation, grid, rates
from ablations.simulate._world import World

SIMULATION = Simulation(
    name="smoothing_phase",
    question="For which tokens per expert and which activity does mesh reach a lower risk than stateless Sinkhorn?",
    decides="In each world alone, at tuned lr: the interval of the ratio of risks lies beyond 1.1, or below 1 / 1.1.",
    worlds=grid(World(experts=4), tokens=(1, 2, 4, 8, 16, 24, 48, 96), activity=(1.0, 0.5, 0.2, 0.1)),
    arms={"stateless": "sinkgd(alpha=1.0)", "mesh": "mesh(beta=0.9)"},
    baseline="stateless",
    lr=rates(5e-4, 0.3, 14),
)
