"""The first run: train a small model, record it live, replay the reel through the preset's arms, write a report."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablations.presets import Recording, recording
from traces.console import progress_bar, say
from traces.errors import GradreelError

if TYPE_CHECKING:
    from ablations.train import TrainResult
    from traces.record_at import RecordAt

DEFAULT_FOLDER = Path("runs/demo")
_MARK = "demo.json"  # written last: only a folder that holds it is replaced by a rerun
_REPLAY_MEMORY_BYTES = 512 << 20


@dataclass(frozen=True)
class DemoResult:
    """What a demo left behind. `folder` holds demo.trace, frame.parquet and report.html; `verdict` is the report's."""

    folder: Path
    verdict: str
    selfcheck: str
    run: TrainResult
    seconds: dict[str, float]
    peak_memory_bytes: int | None

    @property
    def report(self) -> Path:
        """The report's path."""
        return self.folder / "report.html"

    @property
    def trace(self) -> Path:
        """The trace's path."""
        return self.folder / "demo.trace"

    def closing_lines(self) -> list[str]:
        """What the command prints last: cost, report, verdict and three commands to go on with."""
        cost = f"Took {sum(self.seconds.values()):.0f} s"
        if self.peak_memory_bytes:
            cost += f", peak memory {self.peak_memory_bytes / 2**30:.2f} GiB"
        return [
            f"{cost}. Self-check: {self.selfcheck}",
            f"Report: {self.report}",
            f"Verdict: {self.verdict}",
            "Next:",
            f"  gradreel info {self.trace}",
            f"  gradreel replay {self.trace} --recipe mesh --recipe sinkgd --metric update_cos",
            f"  gradreel compare {self.trace} --recipe adamw --recipe skewadam",
        ]


def run_demo(
    folder: str | Path = DEFAULT_FOLDER, *, steps: int | None = None, preset: Recording | None = None
) -> DemoResult:
    """Train, record, replay and report into `folder`; `steps` shortens the run.

    Everything is made in a folder beside it and moved into place when complete. A finished demo at `folder` is
    replaced; anything else there is left alone and is a GradreelError.
    """
    preset = recording("demo") if preset is None else preset
    if steps is not None:
        preset = preset.shortened(steps)
    target = Path(folder)
    _refuse_foreign(target)
    with _in_place_of(target) as aside:
        seconds: dict[str, float] = {}
        with _timed(seconds, "record", f"trained and recorded {preset.steps} steps"):
            run = record_preset(
                preset, aside / "demo.trace", notify=lambda text: say(text.replace(str(aside), str(target)))
            )
        with _timed(seconds, "replay", f"replayed them through {len(preset.arms)} recipes"):
            result = _replay(preset, aside)
            result.provenance["trace"]["path"] = str(target / "demo.trace")
            selfcheck = result.selfcheck(preset.trained_recipe()).message
        with _timed(seconds, "report", "drew the figures and wrote the report"):
            verdict = _report(preset, aside, result, selfcheck, run)
        about = {"made_by": "gradreel demo", "seconds": seconds, **preset.to_dict()}
        (aside / _MARK).write_text(json.dumps(about, indent=1) + "\n")
    return DemoResult(target, verdict, selfcheck, run, seconds, peak_memory_bytes())


def record_preset(
    preset: Recording, path: str | Path, at: RecordAt | None = None, *, notify: Callable[[str], None] = say
) -> TrainResult:
    """Train the preset's model from its seed and record it into the new trace `path`; `at` overrides the preset's.

    `notify` receives what the recorder has to say.
    """
    import torch

    from ablations.data.corpus import stdlib_corpus
    from ablations.models import MoELanguageModel
    from ablations.train import Schedule, StepReport, train
    from traces.recorder import Recorder

    corpus = stdlib_corpus()
    torch.manual_seed(preset.seed)
    model = MoELanguageModel(preset.model)
    optimizer = preset.optimizer(model)

    def batches(step: int, micro_step: int) -> dict[str, torch.Tensor]:
        return corpus.batch(preset.seed, step, preset.batch, preset.length, micro_step)

    with (
        Recorder(path, model, optimizer, at=at or preset.record_at(), notify=notify) as reel,
        progress_bar("train and record", preset.steps) as advance,
    ):

        def log(report: StepReport) -> None:
            reel.log(
                loss=report.loss,
                aux_loss=report.aux_loss,
                grad_norm=report.grad_norm,
                clip_factor=report.clip_factor,
            )

        run = train(
            model,
            optimizer,
            batches,
            preset.steps,
            schedule=Schedule(preset.steps, preset.warmup),
            clip=preset.clip,
            on_step=log,
            progress=lambda _: advance(1),
        )
    if run.diverged_at is not None:
        say(f"the run diverged at step {run.diverged_at}: its loss or gradient was not finite; recorded up to there")
    return run


def peak_memory_bytes() -> int | None:
    """The largest resident size this process had; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _replay(preset: Recording, folder: Path) -> Any:
    from toolkit.replay import replay
    from traces.reader import open_trace

    return replay(
        open_trace(folder / "demo.trace"),
        preset.recipes(),
        list(preset.metrics),
        lr={preset.baseline: "recorded"},
        per_expert=preset.per_expert,
        seed=preset.seed,
        memory_bytes=_REPLAY_MEMORY_BYTES,
    )


def _report(preset: Recording, folder: Path, result: Any, selfcheck: str, run: TrainResult) -> str:
    """Write frame.parquet, the replay's rows and the training run's, and report.html; return the verdict."""
    from toolkit.frame import FrameWriter, write_frame
    from toolkit.report import write_report

    losses = run.losses
    if run.diverged_at is None:
        trained = f"The loss went from {losses[0]:.3f} to {losses[-1]:.3f} nats per byte in {len(losses)} steps."
    else:
        trained = f"The run diverged at step {run.diverged_at} of {preset.steps}."
    rows = FrameWriter()
    rows.write(run.rows(result.provenance["trace"]["id"], preset.name, preset.seed))
    frame = result.frame.vstack(rows.close().collect())
    notes = [preset.question, trained, f"Self-check of the recorded optimizer: {selfcheck}", *result.notes]
    provenance = {**result.provenance, "experiment": preset.to_dict(), "notes": notes}
    write_frame(folder / "frame.parquet", frame, provenance)
    title = "A live mixture-of-experts run, replayed"
    return str(write_report(folder / "report.html", frame, title=title, provenance=provenance, notes=notes).verdict)


def _refuse_foreign(target: Path) -> None:
    """Raise unless `target` is absent, an empty folder, or a finished demo."""
    if not target.exists() and not target.is_symlink():
        return
    if target.is_dir() and (not any(target.iterdir()) or _is_finished_demo(target)):
        return
    raise GradreelError(
        f"{str(target)!r} exists and is no finished demo, so it is left alone; move it away, or give another folder"
    )


def _is_finished_demo(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _MARK).read_text())["made_by"] == "gradreel demo")
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def _in_place_of(target: Path) -> Iterator[Path]:
    """A fresh folder beside `target` that takes its place when the block succeeds, and is removed when it fails."""
    target = target.resolve()  # a link stays a link, and the work happens on the disk it points to
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield aside
        aside.chmod(0o777 & ~_umask())
        _refuse_foreign(target)  # it may have appeared meanwhile
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        replaced = target.exists()
        if replaced:
            os.replace(target, old / target.name)
        try:
            os.replace(aside, target)
        except OSError:
            if replaced:
                os.replace(old / target.name, target)
            old.rmdir()
            raise
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _timed(seconds: dict[str, float], name: str, done: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - began, 3)
    say(f"{done} in {seconds[name]:.0f} s")  # where no bar is drawn, the only sign of life
