"""How fast simulations run: 1,000 configurations (an arm, an lr, a seed) of 1,000 steps each.

E = 8 experts of 24x24, 8 tokens each, stateless Sinkhorn and MESH. Wall time says what a user waits; processor time
beside it says what it would be on a machine that does nothing else.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from json import dumps
from statistics import median

from ablations.simulate._engine import Lane, run_lanes
from ablations.simulate._preset import rates
from ablations.simulate._world import World
from traces.console import CheckFailed, out, progress_bar
from traces.errors import GradreelError

BAR_SECONDS = 60.0
BAR_THREADS = 2
_LR, _SEEDS = 25, 20


@dataclass(frozen=True)
class SimulateBench:
    """`seconds` and `processor_seconds` are medians over `rounds`; the bar concerns `seconds` on two threads."""

    configurations: int
    steps: int
    threads: int
    rounds: int
    seconds: float
    processor_seconds: float
    microseconds_per_expert_step: float
    bar_seconds: float = BAR_SECONDS

    @property
    def within_bar(self) -> bool:
        """Whether the wall time keeps the bar."""
        return self.seconds <= self.bar_seconds


def bench_simulate(rounds: int = 1, *, steps: int = 1000, seeds: int = _SEEDS) -> SimulateBench:
    """Time `rounds` runs of the whole, after one short run that compiles."""
    if rounds < 1 or steps < 1 or seeds < 1:
        raise GradreelError(f"rounds {rounds}, steps {steps}, seeds {seeds}; allowed: at least 1 each")
    arms = ("sinkgd(alpha=1.0)", "mesh")
    lanes = [Lane(arm, lr) for arm in arms for lr in rates(1e-3, 0.1, _LR)]
    world = World(tokens=8, steps=steps)
    run_lanes(World(tokens=8, steps=2), lanes[:1], [0], threads=1)
    wall, processor = [], []
    with progress_bar("bench simulate", rounds * seeds * world.experts, "expert runs") as bar:
        for _ in range(rounds):
            began, used = time.perf_counter(), time.process_time()
            run_lanes(world, lanes, list(range(seeds)), threads=BAR_THREADS, on_done=bar)
            wall.append(time.perf_counter() - began)
            processor.append(time.process_time() - used)
    count = len(lanes) * seeds
    each = median(processor) / (count * steps * world.experts) * 1e6
    return SimulateBench(count, steps, BAR_THREADS, rounds, median(wall), median(processor), each)


def run_bench(*, json: bool = False, pairs: int | None = None) -> None:
    """Measure and print one line, or JSON; raises `CheckFailed` where it takes longer than the bar."""
    result = bench_simulate(1 if pairs is None else pairs)
    if json:
        print(dumps({"op": "simulate", "unit": "seconds", **asdict(result)}))
    else:
        text = (
            f"{result.configurations} configurations x {result.steps} steps: {result.seconds:.1f} s on "
            f"{result.threads} threads, {result.processor_seconds:.1f} s of processor time, "
            f"{result.microseconds_per_expert_step:.1f} us a step of one expert; the bar is {result.bar_seconds:.0f} s"
        )
        out().print(text, soft_wrap=True)
    if not result.within_bar:
        raise CheckFailed(f"the simulation took {result.seconds:.1f} s; the bar is {result.bar_seconds:.0f} s")
