"""Rank against effective lr: gradients of one token against full-rank noise of the same mean and covariance."""

from ablations.simulate._preset import Simulation, grid, rates
from ablations.simulate._world import World

_TOKENS = World(experts=4)
_MATCHED = World(gradient="matched", rank=1, experts=4)

SIMULATION = Simulation(
    name="rank_or_rate",
    question=(
        "Does smoothing before Sinkhorn help with few tokens because the gradient lacks rank (H1), because it changes "
        "the effective lr (H2), or because the gradient is noisy (H3)?"
    ),
    decides=(
        "H2 is refuted where mesh is better at tuned lr in any world. With the noise of 1 token: H1 is supported where "
        "the ratio at tuned lr is smaller, by intervals that do not meet, under full-rank noise (rank 96) than under "
        "the token itself; rank is all of it where the ratio under full-rank noise is not better than 1. H3 is "
        "supported as far as mesh is still better there."
    ),
    worlds={
        **grid(_TOKENS, tokens=(1, 8, 64)),
        **grid(_MATCHED, tokens=(1,), rank=(1, 4, 24, 96)),
        **grid(_MATCHED, tokens=(8,), rank=(1, 96)),
        **grid(_MATCHED, tokens=(64,), rank=(96,)),
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
