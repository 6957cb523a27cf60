"""What recording costs: the time of a recorded step over that of the same step unrecorded, in pairs.

Equal models train side by side on equal batches: one that is not recorded, and two of each way to record. A round takes
one step of each in random order, so that whatever else the machine does falls on all alike. A recorded step's time
includes waiting until the writer has put the step away, so nothing is left to be paid by the step after it.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ablations.presets import Recording, recording
from traces.console import CheckFailed, out, progress_bar
from traces.errors import GradreelError, unknown

if TYPE_CHECKING:
    import torch

    from traces.recorder import Recorder

#: Mode -> the most that its steps may take, over steps that are not recorded.
BARS = {"statistics": 1.03, "full": 1.08, "bursts": 1.01}
_SAYS = {
    "statistics": "statistics of every expert at every step",
    "full": "full expert gradients at every step",
    "bursts": "bursts of 16 in 500: (16 x full + 484 x idle) / 500",
}
_BURST, _PERIOD = 16, 500
#: Ways to record that are timed; a burst is made of recorded and of idle steps.
_WAYS = {"statistics": ("statistics",), "full": ("full",), "bursts": ("full", "idle")}
_WARMUP_ROUNDS = 5
_ROUNDS_PER_TRACE = 50  # then a fresh trace, and the old one is removed: bounds the disk used
_RESAMPLES = 5000


@dataclass(frozen=True)
class Ratio:
    """Paired ratios: their median, and the ratio of the summed times, each with a 95% bootstrap interval.

    The median is what an ordinary step costs; the sums also hold the few steps at which a chunk is written and synced.
    """

    median: float
    low: float
    high: float
    of_sums: float
    of_sums_low: float
    of_sums_high: float
    pairs: int


@dataclass(frozen=True)
class OverheadResult:
    """One mode. `overhead` is recorded over plain, `control` recorded over recorded. Times in ms as (p20, p50, p80)."""

    mode: str
    overhead: Ratio
    control: Ratio
    plain_ms: tuple[float, float, float]
    recorded_ms: tuple[float, float, float]
    trace_bytes_per_step: float
    tokens_per_step: int
    device: str
    threads: int
    versions: dict[str, str]
    bar: float

    @property
    def within_bar(self) -> bool:
        """Whether the upper end of the interval is at most the bar."""
        return self.overhead.high <= self.bar


def ratio_of(numerators: np.ndarray, denominators: np.ndarray, seed: int = 0) -> Ratio:
    """The median paired ratio of two float arrays [n] of times, with a 95% percentile-bootstrap interval."""
    ratios = numerators / denominators
    draws = np.random.default_rng(seed).integers(0, ratios.size, size=(_RESAMPLES, ratios.size))
    low, high = np.quantile(np.median(ratios[draws], axis=1), [0.025, 0.975])
    sums = numerators[draws].sum(axis=1) / denominators[draws].sum(axis=1)
    sums_low, sums_high = np.quantile(sums, [0.025, 0.975])
    of_sums = float(numerators.sum() / denominators.sum())
    return Ratio(
        median=float(np.median(ratios)),
        low=float(low),
        high=float(high),
        of_sums=of_sums,
        of_sums_low=float(sums_low),
        of_sums_high=float(sums_high),
        pairs=int(ratios.size),
    )


def bench_recorder(
    pairs: int = 300,
    *,
    modes: Sequence[str] = tuple(BARS),
    preset: Recording | None = None,
    folder: str | Path | None = None,
    drain: bool = True,
) -> list[OverheadResult]:
    """Time `pairs` rounds of the demo's model, in each of `modes`.

    `folder` takes the traces for a while (default: the temporary folder). `drain=False` leaves the writer's work to
    overlap with the next step, whichever that is, as it does in training.
    """
    if pairs < 2:
        raise GradreelError(f"pairs is {pairs}; allowed: at least 2")
    for mode in modes:
        if mode not in BARS:
            raise unknown("mode", mode, BARS)
    preset = recording("demo") if preset is None else preset
    ways = tuple(dict.fromkeys(way for mode in modes for way in _WAYS[mode]))
    lanes = [_Lane(preset, way) for way in (None, *ways, *ways)]
    times, bytes_per_step = _rounds(lanes, pairs, folder, drain)
    plain = times[0]
    with_, again = (dict(zip(ways, part, strict=True)) for part in (times[1 : len(ways) + 1], times[len(ways) + 1 :]))
    sizes = dict(zip(ways, bytes_per_step[1:], strict=False))
    return [_result(mode, preset, plain, _of_mode(mode, with_), _of_mode(mode, again), sizes) for mode in modes]


def _of_mode(mode: str, by_way: dict[str, np.ndarray]) -> np.ndarray:
    if mode != "bursts":
        return by_way[mode]
    return (_BURST * by_way["full"] + (_PERIOD - _BURST) * by_way["idle"]) / _PERIOD


def _rounds(lanes: list[_Lane], pairs: int, folder: str | Path | None, drain: bool) -> tuple[np.ndarray, list[float]]:
    """Seconds [lanes, pairs], and what each lane's traces took per step."""
    order = np.random.default_rng(0)
    times: list[list[float]] = []
    sizes: list[list[float]] = [[] for _ in lanes]
    with (
        tempfile.TemporaryDirectory(prefix="gradreel-bench-", dir=folder) as scratch,
        progress_bar("bench recorder", pairs, "pairs") as advance,
    ):
        while len(times) < pairs:
            rounds = min(_ROUNDS_PER_TRACE, pairs - len(times))
            with ExitStack() as stack:
                for number, lane in enumerate(lanes):
                    lane.attach(stack, Path(scratch) / f"{number}.trace")
                for index in range(-_WARMUP_ROUNDS, rounds):
                    taken = [0.0] * len(lanes)
                    for number in order.permutation(len(lanes)):
                        taken[number] = lanes[number].step(drain)
                    if index >= 0:
                        times.append(taken)
                        advance(1)
            for path in Path(scratch).iterdir():
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                sizes[int(path.stem)].append(size / (rounds + _WARMUP_ROUNDS))
                shutil.rmtree(path)
    return np.array(times).T, [float(np.mean(each)) if each else 0.0 for each in sizes]


def _result(
    mode: str,
    preset: Recording,
    plain: np.ndarray,
    recorded: np.ndarray,
    again: np.ndarray,
    sizes: dict[str, float],
) -> OverheadResult:
    import torch

    share = _BURST / _PERIOD
    size = share * sizes["full"] + (1 - share) * sizes["idle"] if mode == "bursts" else sizes[mode]
    return OverheadResult(
        mode=mode,
        overhead=ratio_of(recorded, plain),
        control=ratio_of(recorded, again),
        plain_ms=_percentiles(plain),
        recorded_ms=_percentiles(recorded),
        trace_bytes_per_step=size,
        tokens_per_step=preset.batch * preset.length,
        device="cpu",
        threads=torch.get_num_threads(),
        versions={"python": platform.python_version(), "torch": torch.__version__},
        bar=BARS[mode],
    )


def run_bench(*, json: bool = False, pairs: int | None = None) -> None:
    """Print a table, or a JSON line a mode; raises `CheckFailed` where an overhead is not within its bar."""
    results = bench_recorder(pairs or 300)
    if json:
        for result in results:
            print(dumps({"op": "recorder", "unit": "ratio of seconds", **asdict(result)}))
    else:
        _show(results)
    if over := [result for result in results if not result.within_bar]:
        costs = ", ".join(f"{one.mode} up to {one.overhead.high:.4f} (bar {one.bar})" for one in over)
        raise CheckFailed(f"recording costs more of a step's time than it may: {costs}")


def _show(results: Sequence[OverheadResult]) -> None:
    from rich.table import Table

    columns = ("mode", "median ratio [95% interval]", "ratio of sums [95% interval]", "bar")
    table = Table(*columns, title=f"cost of recording, {results[0].overhead.pairs} pairs")
    for result in results:
        for name, ratio in ((result.mode, result.overhead), ("  with / with", result.control)):
            median = f"{ratio.median:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
            of_sums = f"{ratio.of_sums:.4f} [{ratio.of_sums_low:.4f}, {ratio.of_sums_high:.4f}]"
            table.add_row(name, median, of_sums, f"{result.bar}" if ratio is result.overhead else "")
    console = out()
    console.print(table)
    p20, p50, p80 = results[0].plain_ms
    console.print(
        f"plain step {p50:.1f} ms (p20 {p20:.1f}, p80 {p80:.1f}), {results[0].tokens_per_step} tokens, "
        f"{results[0].threads} threads"
    )
    for result in results:
        word = "within" if result.within_bar else "not within"
        console.print(
            f"{result.mode}: {_SAYS[result.mode]}; {result.trace_bytes_per_step / 1e6:.3f} MB a step; upper end "
            f"{result.overhead.high:.4f} is {word} the bar of {result.bar}"
        )


class _Lane:
    """One of the models, with its optimizer, its own clock of steps and, where recorded, its recorder."""

    def __init__(self, preset: Recording, way: str | None) -> None:
        import torch

        from ablations.data.corpus import stdlib_corpus
        from ablations.models import MoELanguageModel

        self.preset, self.way = preset, way
        torch.manual_seed(preset.seed)
        self.model = MoELanguageModel(preset.model)
        self.optimizer = preset.optimizer(self.model)
        self.corpus = stdlib_corpus()
        self.steps = 0
        self.reel: Recorder | None = None

    def attach(self, stack: ExitStack, path: Path) -> None:
        """Record from now on into `path`, until the stack closes; a plain lane does nothing."""
        if self.way is not None:
            from toolkit.kernels import step_statistics
            from traces.recorder import Recorder

            at = self.preset.record_at()
            if self.way == "statistics":
                at = replace(at, streams=("statistics", "scalars"))
            elif self.way == "idle":  # recorded in the warm-up, then never again
                at = replace(at, every=1, bursts=(1, 1 << 40))
            statistics = step_statistics if self.way == "statistics" else None
            recorder = Recorder(path, self.model, self.optimizer, at=at, statistics=statistics, notify=_quiet)
            self.reel = stack.enter_context(recorder)

    def step(self, drain: bool) -> float:
        """Take one step and return its seconds."""
        self.steps += 1
        batch = self.corpus.batch(self.preset.seed, self.steps, self.preset.batch, self.preset.length)
        began = time.perf_counter()
        _take_step(self.model, self.optimizer, batch, self.preset.clip, self.reel)
        if drain and self.reel is not None:
            self.reel.flush()
        return time.perf_counter() - began


def _take_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], clip: float, reel: Recorder | None
) -> None:
    import torch

    optimizer.zero_grad(set_to_none=True)
    out = model(**batch)
    out.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    if reel is not None:
        reel.log(loss=float(out.cross_entropy.detach()), grad_norm=float(norm))
    optimizer.step()


def _quiet(message: str) -> None:
    """The size of a trace that lives for a minute is no news."""


def _percentiles(seconds: np.ndarray) -> tuple[float, float, float]:
    p20, p50, p80 = np.quantile(seconds * 1e3, [0.2, 0.5, 0.8])
    return float(p20), float(p50), float(p80)
