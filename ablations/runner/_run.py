"""The runner: an experiment's runs, those that are missing made, and all of them put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ablations.executors import EXECUTORS, Job
from ablations.presets import Ablation, Size, load_preset
from ablations.presets._ablation import changed
from ablations.runner._plan import Plan
from ablations.runner._reel import ensure_routing
from ablations.runner._spec import Finished, RunSpec
from ablations.runner._store import finished, locked, remove_remains
from traces.console import progress_bar, say
from traces.errors import GradreelError
from traces.registry import loaded_plugin_files

_FAILURES_TOLD = 5


@dataclass(frozen=True)
class Made:
    """The runs of an experiment: the filled plan, every run that is finished by id, and why others failed."""

    plan: Plan
    runs: Mapping[str, Finished]
    failed: Mapping[str, str]


def chosen(
    preset: str | Ablation,
    size: str,
    *,
    arms: Sequence[str] | None = None,
    seeds: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> tuple[Ablation, Size]:
    """The experiment and its size, cut down to some `arms` and the first `seeds` seeds, with entries changed."""
    experiment = load_preset(preset)
    if arms:
        experiment = experiment.only(tuple(arms))
    wanted = changed(experiment.size(size), changes or {})
    if seeds is not None:
        if not 1 <= seeds <= len(wanted.seeds):
            raise GradreelError(
                f"seeds is {seeds}; allowed: 1 to {len(wanted.seeds)}, which preset {experiment.name} has"
            )
        kept = wanted.seeds[:seeds]
        tuning = tuple(seed for seed in wanted.tuning_seeds if seed in kept) or kept[:1]
        wanted = replace(wanted, seeds=kept, tuning_seeds=tuning)
    return experiment, wanted


def make_runs(
    preset: Ablation,
    size: Size,
    root: Path,
    *,
    executor: str = "local",
    workers: int = 2,
) -> Made:
    """Make what is missing of the experiment in `root`; a run that is there already is kept.

    Stages follow each other, since the later ones depend on what the earlier ones found. Failed runs are named and do
    not stop the others. An interrupt leaves every finished run in place.
    """
    EXECUTORS.get(executor)  # an unknown name is told before anything is locked
    plan = Plan(preset, size)
    runs: dict[str, Finished] = {}
    failed: dict[str, str] = {}
    total = plan.most_runs() * size.steps
    with locked(root), progress_bar(f"run {preset.name}", total) as advance:
        remove_remains(root)

        def stage(specs: Iterable[RunSpec]) -> None:
            missing = []
            for spec in specs:
                if spec.id in runs or spec.id in failed:
                    continue
                known = finished(root, spec.id)
                if known is None:
                    missing.append(spec)
                    continue
                runs[spec.id] = known
                advance(spec.steps)
            reels = {spec.routing: plan.reels[spec.routing] for spec in missing if spec.routing is not None}
            for reel in reels.values():
                ensure_routing(reel, root)
            made, lost = execute_specs(missing, root, executor=executor, workers=workers, advance=advance)
            runs.update(made)
            failed.update(lost)

        try:
            stage(plan.first())
            stage(plan.second(runs))
            stage(plan.third(runs))
        except KeyboardInterrupt:
            kept = len(list(root.glob("[!.]*/run.json")))
            say(f"interrupted; {kept} finished runs are kept in {str(root)!r}, and the same command goes on from there")
            raise
    _check_pairs(plan, runs)
    return Made(plan, runs, failed)


def execute_specs(
    specs: Sequence[RunSpec], root: Path, *, executor: str, workers: int, advance: Callable[[int], None]
) -> tuple[dict[str, Finished], dict[str, str]]:
    """Make runs that do not depend on each other; give those that are finished, and why others failed, by id."""
    jobs = {spec.id: Job(spec.id, spec.to_dict(), str(root.resolve()), loaded_plugin_files()) for spec in specs}
    if not jobs:
        return {}, {}
    told = dict.fromkeys(jobs, 0)

    def on_steps(run_id: str, count: int) -> None:
        told[run_id] += count
        advance(count)

    made: dict[str, Finished] = {}
    failed: dict[str, str] = {}
    outcomes = EXECUTORS.get(executor).run(list(jobs.values()), workers=workers, on_steps=on_steps)
    try:
        for outcome in outcomes:
            job = jobs[outcome.id]
            advance(job.steps - told[outcome.id])
            known = finished(root, outcome.id) if outcome.error is None else None
            which = f"run {outcome.id} ({job.spec['recipe']}, lr {job.spec['lr']:g}, seed {job.spec['seed']})"
            if known is None:
                failed[outcome.id] = outcome.error or "its executor says it is done, but its folder is not there"
                if len(failed) <= _FAILURES_TOLD:
                    say(f"{which} failed: {failed[outcome.id]}")
                continue
            made[outcome.id] = known
            if known.diverged_at is not None:
                say(f"{which} diverged at step {known.diverged_at}")
    finally:
        outcomes.close()
    if len(failed) > _FAILURES_TOLD:
        say(f"and {len(failed) - _FAILURES_TOLD} more runs failed; provenance.json names them all")
    return made, failed


def _check_pairs(plan: Plan, runs: Mapping[str, Finished]) -> None:
    """All arms of a seed must have begun with equal weights and seen equal batches, else nothing is paired."""
    first: dict[tuple[str, int], Finished] = {}
    for cell, specs in plan.cells.items():
        for spec in specs:
            ended = runs.get(spec.id)
            if ended is None:
                continue
            other = first.setdefault((cell.setting, cell.seed), ended)
            for name, what in (("weights_sha256", "initial weights"), ("batches_sha256", "batches")):
                if getattr(ended, name) != getattr(other, name):
                    raise GradreelError(
                        f"seed {cell.seed}: runs {other.id} and {ended.id} have different {what}, so arms are not "
                        "paired; the data or the code changed between them: remove one of the two folders and run again"
                    )
