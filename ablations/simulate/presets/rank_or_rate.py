"""Rank against effective lr: the number of outer products is changed while mean and covariance of the gradient stay."""

from ablations.simulate._preset import Simulation, grid, rates
from ablations.simulate._world import World

_MATCHED = World(gradient="matched", rank=1, experts=4)

SIMULATION = Simulation(
    name="rank_or_rate",
    question=(
        "Does smoothing before Sinkhorn help with few tokens because the gradient lacks rank (H1), because it changes "
        "the effective lr (H2), or because the gradient is noisy (H3)?"
    ),
    decides=(
        "H2 is refuted where mesh is better at tuned lr in any world. H1 is supported where, with the noise of 1 "
        "token, the ratio at tuned lr falls from rank 1 to rank 96 with intervals that do not meet; rank is the whole of it "
        "where it is equal at rank 96. H3 is supported as far as mesh is still better at rank 96."
    ),
    worlds={
        **grid(_MATCHED, tokens=(1, 8), rank=(1, 2, 4, 8, 24, 96)),
        **grid(_MATCHED, tokens=(64,), rank=(1, 96)),
    },
    arms={
        "stateless": "sinkgd(alpha=1.0)",
        "mesh": "mesh(beta=0.9)",
        "normalise_then_momentum": "normalise_then_momentum(beta=0.9)",
        "rms": "rms",
        "momentum_then_rms": "momentum_then_rms",
        "sgd": "sgd",
        "sgd_momentum": "sgd(momentum=0.9)",
    },
    baseline="stateless",
    lr=rates(5e-4, 0.2, 12),
    grids={"sgd": rates(1e-3, 0.5, 12), "sgd_momentum": rates(1e-4, 0.05, 12)},
)
