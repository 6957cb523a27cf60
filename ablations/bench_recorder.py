"""What recording costs: the time of a recorded step over that of the same step unrecorded, in pairs.

Three equal models train side by side on equal batches: one recorded, one not, and one more recorded. A round takes one
step of each in random order, so that whatever else the machine does falls on all three alike. A recorded step's time
includes waiting until the writer has put the step away, so nothing is left to be paid by the step after it.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ablations.presets import Recording, recording
from traces.console import CheckFailed, out, progress_bar
from traces.errors import GradreelError

if TYPE_CHECKING:
    import torch

    from traces.recorder import Recorder

BAR = 1.08
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
    """`overhead` is recorded over plain, `control` recorded over recorded. Times in ms as (p20, p50, p80)."""

    overhead: Ratio
    control: Ratio
    plain_ms: tuple[float, float, float]
    recorded_ms: tuple[float, float, float]
    trace_bytes_per_step: float
    tokens_per_step: int
    device: str
    threads: int
    versions: dict[str, str]
    bar: float = BAR

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
    pairs: int = 300, *, preset: Recording | None = None, folder: str | Path | None = None, drain: bool = True
) -> OverheadResult:
    """Time `pairs` rounds of the demo's model. `folder` takes the traces for a while (default: the temporary folder).

    `drain=False` leaves the writer's work to overlap with the next step, whichever that is, as it does in training.
    """
    import torch

    if pairs < 2:
        raise GradreelError(f"pairs is {pairs}; allowed: at least 2")
    preset = recording("demo") if preset is None else preset
    order = np.random.default_rng(0)
    times: list[list[float]] = []
    bytes_per_step: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="gradreel-bench-", dir=folder) as scratch,
        progress_bar("bench recorder", pairs, "pairs") as advance,
    ):
        lanes = [_Lane(preset, recorded=recorded) for recorded in (True, False, True)]
        done = 0
        while done < pairs:
            rounds = min(_ROUNDS_PER_TRACE, pairs - done)
            with ExitStack() as stack:
                for number, lane in enumerate(lanes):
                    lane.attach(stack, Path(scratch) / f"{done}-{number}.trace")
                for index in range(-_WARMUP_ROUNDS, rounds):
                    taken = [0.0] * len(lanes)
                    for number in order.permutation(len(lanes)):
                        taken[number] = lanes[number].step(drain)
                    if index >= 0:
                        times.append(taken)
                        advance(1)
            for path in Path(scratch).iterdir():
                size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                bytes_per_step.append(size / (rounds + _WARMUP_ROUNDS))
                shutil.rmtree(path)
            done += rounds
    recorded, plain, again = np.array(times).T
    return OverheadResult(
        overhead=ratio_of(recorded, plain),
        control=ratio_of(recorded, again),
        plain_ms=_percentiles(plain),
        recorded_ms=_percentiles(recorded),
        trace_bytes_per_step=float(np.mean(bytes_per_step)),
        tokens_per_step=preset.batch * preset.length,
        device="cpu",
        threads=torch.get_num_threads(),
        versions={"python": platform.python_version(), "torch": torch.__version__},
    )


def run_bench(*, json: bool = False, pairs: int | None = None) -> None:
    """Measure and print a table, or one JSON line; raises `CheckFailed` where the overhead is not within the bar."""
    result = bench_recorder(pairs or 300)
    if json:
        print(dumps({"op": "recorder", "unit": "ratio of seconds", **asdict(result)}))
    else:
        _show(result)
    if not result.within_bar:
        raise CheckFailed(f"recording costs up to {result.overhead.high:.4f} of a step's time; the bar is {BAR}")


def _show(result: OverheadResult) -> None:
    from rich.table import Table

    table = Table("pairs", "median ratio [95% interval]", "ratio of sums [95% interval]", title="cost of recording")
    for name, ratio in (("with / without", result.overhead), ("with / with", result.control)):
        median = f"{ratio.median:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
        of_sums = f"{ratio.of_sums:.4f} [{ratio.of_sums_low:.4f}, {ratio.of_sums_high:.4f}]"
        table.add_row(f"{name} ({ratio.pairs})", median, of_sums)
    console = out()
    console.print(table)
    p20, p50, p80 = result.plain_ms
    console.print(f"plain step {p50:.1f} ms (p20 {p20:.1f}, p80 {p80:.1f}), {result.tokens_per_step} tokens")
    console.print(f"trace {result.trace_bytes_per_step / 1e6:.2f} MB a step, {result.threads} threads")
    word = "within" if result.within_bar else "not within"
    console.print(f"upper end {result.overhead.high:.4f} is {word} the bar of {result.bar}")


class _Lane:
    """One of the models, with its optimizer, its own clock of steps and, where recorded, its recorder."""

    def __init__(self, preset: Recording, *, recorded: bool) -> None:
        import torch

        from ablations.data.corpus import stdlib_corpus
        from ablations.models import MoELanguageModel

        self.preset, self.recorded = preset, recorded
        torch.manual_seed(preset.seed)
        self.model = MoELanguageModel(preset.model)
        self.optimizer = preset.optimizer(self.model)
        self.corpus = stdlib_corpus()
        self.steps = 0
        self.reel: Recorder | None = None

    def attach(self, stack: ExitStack, path: Path) -> None:
        """Record from now on into `path`, until the stack closes; a plain lane does nothing."""
        if self.recorded:
            from traces.recorder import Recorder

            recorder = Recorder(path, self.model, self.optimizer, at=self.preset.record_at(), notify=_quiet)
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
