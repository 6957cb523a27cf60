"""Which runs an experiment needs: first the grid and the shared rate, then the best rates, then matched sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ablations.presets import Ablation, Size
from ablations.presets._ablation import ONLY
from ablations.runner._spec import ALL, EXPERTS, Finished, RunSpec, run_spec

GRID = "grid"


@dataclass(frozen=True)
class Cell:
    """One place in an experiment's table: an arm under a setting, from a seed, compared in one way (or in the grid)."""

    way: str
    setting: str
    arm: str
    seed: int

    @property
    def label(self) -> str:
        """The arm as the frame calls it: with its setting in front where there are several."""
        return arm_label(self.setting, self.arm)


def arm_label(setting: str, arm: str) -> str:
    """`arm`, or `setting/arm`."""
    return arm if setting == ONLY else f"{setting}/{arm}"


@dataclass(frozen=True)
class Tuning:
    """What the grid of one arm showed: the mean validation loss at each rate (inf: diverged or failed).

    `best` is None where no rate trained. `edge` says that it is the smallest or the largest rate that was tried.
    """

    losses: Mapping[float, float]
    best: float | None
    edge: bool


@dataclass
class Plan:
    """The table of an experiment, filled stage by stage. `cells` holds the runs known so far; a grid has several."""

    preset: Ablation
    size: Size
    cells: dict[Cell, list[RunSpec]] = field(default_factory=dict)
    tuning: dict[tuple[str, str], Tuning] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reels: dict[str, RunSpec] = field(default_factory=dict)  # by id, runs whose routing others train on

    def first(self) -> list[RunSpec]:
        """The grid on the tuning seeds, and every arm at the shared rate."""
        for setting, arm, size in self.arms():
            for seed in size.tuning_seeds:
                if self._tunes:
                    runs = [self._spec(size, arm, lr, seed) for lr in size.rates(arm)]
                    self.cells[Cell(GRID, setting, arm, seed)] = runs
            for seed in size.seeds:
                if "shared" in self.preset.ways:
                    self.cells[Cell("shared", setting, arm, seed)] = [self._spec(size, arm, size.shared_lr, seed)]
        return self.specs((GRID, "shared"))

    def second(self, known: Mapping[str, Finished]) -> list[RunSpec]:
        """Every arm at its own best rate, from every seed."""
        if not self._tunes:
            return []
        for setting, arm, size in self.arms():
            found = self._tune(size, setting, arm, known)
            self.tuning[setting, arm] = found
            label = arm_label(setting, arm)
            if found.best is None:
                self.notes.append(f"{label} trained at none of its rates, so it has no best one")
                continue
            if found.edge and len(found.losses) > 1:
                self.notes.append(
                    f"{label}: its best lr {found.best:g} is on the edge of its grid {_shown(found.losses)}; a wider "
                    "grid may favour it"
                )
            for seed in size.seeds:
                self.cells[Cell("tuned", setting, arm, seed)] = [self._spec(size, arm, found.best, seed)]
        return self.specs(("tuned",))

    def third(self, known: Mapping[str, Finished]) -> list[RunSpec]:
        """Every arm but the baseline with the sizes of weight change of the baseline's best run of the same seed."""
        if "matched" not in self.preset.ways:
            return []
        for setting, arm, size in self.arms():
            for seed in size.seeds:
                tuned = self.cells.get(Cell("tuned", setting, self.preset.baseline, seed))
                ended = None if tuned is None else known.get(tuned[0].id)
                if tuned is None or ended is None or ended.final_loss is None:
                    note = f"seed {seed}: {arm_label(setting, self.preset.baseline)} has no sizes to match"
                    if note not in self.notes:
                        self.notes.append(note)
                    continue
                cell = Cell("matched", setting, arm, seed)
                if arm == self.preset.baseline:
                    self.cells[cell] = list(tuned)
                else:
                    self.cells[cell] = [self._spec(size, arm, size.shared_lr, seed, matched=tuned[0].id)]
        return self.specs(("matched",))

    def specs(self, ways: Iterable[str] | None = None) -> list[RunSpec]:
        """The runs of some ways (default: of all), each once, in the order of the table: seed by seed, arm by arm."""
        wanted = {
            spec.id: spec
            for cell, runs in sorted(self.cells.items(), key=lambda item: item[0].seed)
            if ways is None or cell.way in ways
            for spec in runs
        }
        return list(wanted.values())

    def most_runs(self) -> int:
        """How many runs there are if no best rate is the shared one."""
        total = 0
        for _, arm, size in self.arms():
            seeds, tuned = len(size.seeds), len(size.tuning_seeds)
            rates = size.rates(arm) if self._tunes else ()
            total += len(rates) * tuned + (seeds - tuned) * self._tunes
            if "shared" in self.preset.ways:
                total += seeds - tuned * (size.shared_lr in rates)
            if "matched" in self.preset.ways and arm != self.preset.baseline:
                total += seeds
        return total

    @property
    def _tunes(self) -> bool:
        return "tuned" in self.preset.ways or "matched" in self.preset.ways

    def arms(self) -> Iterable[tuple[str, str, Size]]:
        """Every (setting, arm, the size under that setting), in the preset's order."""
        for setting in self.size.settings:
            size = self.size.under(setting)
            for arm in self.preset.arms:
                yield setting, arm, size

    def _spec(self, size: Size, arm: str, lr: float, seed: int, *, matched: str | None = None) -> RunSpec:
        measured = EXPERTS if self.preset.experts_only else ALL
        routing = None
        if self.preset.arms[arm].routing == "recorded":
            baseline = self._spec(size, self.preset.baseline, size.shared_lr, seed)
            self.reels[baseline.id], routing = baseline, baseline.id
        recipe = self.preset.expression(arm, size)
        return run_spec(size, recipe, lr, seed, measured=measured, matched=matched, routing=routing)

    def _tune(self, size: Size, setting: str, arm: str, known: Mapping[str, Finished]) -> Tuning:
        by_rate: dict[float, list[float]] = {lr: [] for lr in size.rates(arm)}
        for seed in size.tuning_seeds:
            for spec in self.cells[Cell(GRID, setting, arm, seed)]:
                ended = known.get(spec.id)
                loss = None if ended is None else ended.final_loss
                by_rate[spec.lr].append(math.inf if loss is None else loss)
        losses = {lr: sum(values) / len(values) for lr, values in by_rate.items()}
        best = min(losses, key=lambda lr: losses[lr])
        if math.isinf(losses[best]):
            return Tuning(losses, None, False)
        return Tuning(losses, best, best in (min(losses), max(losses)))


def _shown(rates: Iterable[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)
