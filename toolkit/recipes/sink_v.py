"""SINK-V: normalise, average, and divide by the noise the average itself shows."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipes._recipe import Recipe, RecipeFamily
from toolkit.recipes.normalise_then_momentum import NormaliseThenMomentumOptions, table


@dataclass(frozen=True)
class SinkVOptions(NormaliseThenMomentumOptions):
    """As normalise_then_momentum; the step is (4 / pi) atan(M / sqrt(v_row v_col)) with v = 1 - mean(M^2)."""


def build(options: SinkVOptions) -> Recipe:
    """The same rule on every role."""
    return Recipe(
        name="sink_v",
        groups=table(options, "snr"),
        lr=options.lr,
        idle=options.idle,
        temporaries={"original": 3.1, "ours": 2.0},
    )


RECIPE = RecipeFamily(
    name="sink_v",
    options=SinkVOptions,
    build=build,
    paper="signal-to-noise form of normalise_then_momentum",
    summary="Sinkhorn, a moving average, and its signal-to-noise ratio, on every role",
    checked_against="a float64 loop",
    rate="as normalise_then_momentum; share 1.04",
)
