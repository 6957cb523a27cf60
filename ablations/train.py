"""Closed-loop training of one model with one optimizer, and its evaluation.

`train` makes no promise about learning; it makes the run a table. A loss that is not finite ends the run before it can
reach the weights, and is its last row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.errors import GradreelError, unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Batch = dict[str, "Tensor"]
#: `batches(step, micro_step)` -> the keyword arguments of one forward, `labels` among them.
Batches = Callable[[int, int], Batch]
#: From a model and a batch to its output, with `loss`, `cross_entropy`, `aux_loss` and `logits`.
Call = Callable[["torch.nn.Module", Batch], Any]


def call_plainly(model: torch.nn.Module, batch: Batch) -> Any:
    """The output of this project's own model, which is what `train` wants."""
    return model(**batch)


@dataclass(frozen=True)
class Schedule:
    """Factors of the peak lr: linear warm-up over `warmup` steps, then a fall that ends at `floor` after the last.

    `shape` is "cosine", "linear", "constant" (no fall), or "wsd": constant, and linear over the last fifth of the steps
    after warm-up. So neither the first nor the last step is spent at lr 0.
    """

    steps: int
    warmup: int = 0
    floor: float = 0.0
    shape: str = "cosine"

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.warmup <= self.steps:
            raise GradreelError(
                f"schedule of {self.steps} steps with {self.warmup} of warm-up; allowed: at least 1 step, and a "
                f"warm-up in [0, steps]"
            )
        if not 0 <= self.floor <= 1:
            raise GradreelError(f"schedule floor is {self.floor}; allowed: [0, 1]")
        if self.shape not in SHAPES:
            raise unknown("schedule", self.shape, SHAPES)

    def factor(self, step: int) -> float:
        """The factor of `step`, counted from 1."""
        if step <= self.warmup:
            return step / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup + 1)
        return self.floor + (1 - self.floor) * SHAPES[self.shape](min(done, 1.0))


#: What is left of the way down to the floor when a part of the steps after warm-up is done; 1 before, 0 at the end.
SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
    "wsd": lambda done: min(1.0, 5 * (1 - done)),
}


@dataclass(frozen=True)
class StepReport:
    """What is known of a step before the optimizer takes it. `clip_factor` multiplied the gradient (1: untouched)."""

    step: int
    loss: float
    aux_loss: float
    lr: float
    grad_norm: float
    clip_factor: float


@dataclass
class TrainResult:
    """One report a step. `diverged_at` is the step whose loss or gradient was not finite; the run ended there."""

    reports: list[StepReport] = field(default_factory=list)
    diverged_at: int | None = None

    @property
    def losses(self) -> list[float]:
        """The training loss (cross-entropy, nats per token) of each step."""
        return [report.loss for report in self.reports]

    def rows(self, run: str, arm: str, seed: int = 0) -> Iterator[dict[str, Any]]:
        """The run as rows of the Frame; the step it diverged at is a row with a null value and the flag `diverged`."""
        for report in self.reports:
            diverged = report.step == self.diverged_at
            yield {
                "run": run,
                "arm": arm,
                "seed": seed,
                "step": report.step,
                "metric": "loss",
                "value": None if diverged else report.loss,
                "flag": "diverged" if diverged else "",
                "unit": "nats",
            }


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    steps: int,
    *,
    schedule: Schedule | None = None,
    clip: float | None = 1.0,
    accumulation: int = 1,
    call: Call = call_plainly,
    on_step: Callable[[StepReport], None] | None = None,
    progress: Callable[[StepReport], None] | None = None,
) -> TrainResult:
    """Take `steps` steps and return what happened.

    Each step averages `accumulation` micro-batches, clips the norm of the whole gradient to `clip` (None: not), and
    scales each group's own lr by the schedule. The norm is that of this step's gradient, hidden momentum left out: an
    optimizer that hides some gives `fresh_gradient`, and keeps one gradient more for it. `call` runs the model.
    `on_step` is called between clipping and the optimizer's step, where a recorder's `log` belongs; `progress` after
    it. Nothing is raised for a loss that is not finite: see `TrainResult`.
    """

    if steps < 0 or accumulation < 1:
        raise GradreelError(f"steps is {steps}, accumulation {accumulation}; allowed: steps >= 0, accumulation >= 1")
    peaks = [group["lr"] for group in optimizer.param_groups]
    track = getattr(optimizer, "track_fresh_gradients", None)
    if callable(track):
        track()
    result = TrainResult()
    model.train()
    for step in range(1, steps + 1):
        factor = 1.0 if schedule is None else schedule.factor(step)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        optimizer.zero_grad(set_to_none=True)
        loss, aux_loss = _accumulate(model, batches, step, accumulation, call)
        norm = _norm_and_clip(optimizer, clip)
        factor_of_clip = 1.0 if clip is None or not math.isfinite(norm) else min(1.0, clip / (norm + 1e-6))
        report = StepReport(step, loss, aux_loss, optimizer.param_groups[0]["lr"], norm, factor_of_clip)
        result.reports.append(report)
        if on_step is not None:
            on_step(report)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            result.diverged_at = step
            break
        optimizer.step()
        if progress is not None:
            progress(report)
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["lr"] = peak
    return result


def evaluate(model: torch.nn.Module, batches: Iterable[Batch]) -> float:
    """The mean cross-entropy in nats per token over `batches`, each weighted by its tokens. Leaves the model's mode."""
    import torch

    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    try:
        with torch.no_grad():
            for batch in batches:
                wanted = batch["labels"] >= 0
                if "attention_mask" in batch:
                    wanted = wanted & batch["attention_mask"].bool()
                count = int(wanted.sum())
                total += float(model(**batch).cross_entropy) * count
                tokens += count
    finally:
        model.train(was_training)
    if tokens == 0:
        raise GradreelError("evaluation got no tokens with a label; give at least one batch")
    return total / tokens


def window_losses(model: torch.nn.Module, batches: Iterable[Batch], *, call: Call = call_plainly) -> np.ndarray:
    """The mean cross-entropy, nats per token, of each sequence in `batches`: float64 [sequences]. All labels count."""
    import torch
    from torch.nn import functional as F

    was_training = model.training
    model.eval()
    found = []
    try:
        with torch.no_grad():
            for batch in batches:
                labels = batch["labels"]
                logits = call(model, batch).logits.flatten(0, 1).float()
                losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)
                found.append(losses.double().mean(dim=1).cpu().numpy())
    finally:
        model.train(was_training)
    return np.concatenate(found)


def _accumulate(
    model: torch.nn.Module, batches: Batches, step: int, accumulation: int, call: Call
) -> tuple[float, float]:
    """Backward through the micro-batches; the step's mean cross-entropy and aux loss."""
    loss = aux_loss = 0.0
    for micro_step in range(accumulation):
        out = call(model, batches(step, micro_step))
        (out.loss / accumulation).backward()
        loss += float(out.cross_entropy.detach()) / accumulation
        aux_loss += float(out.aux_loss.detach()) / accumulation
    return loss, aux_loss


def _norm_and_clip(optimizer: torch.optim.Optimizer, clip: float | None) -> float:
    """The norm of the whole gradient of this step, before the clipping that this does as well."""
    import torch

    if callable(getattr(optimizer, "fresh_gradient", None)):
        from toolkit.optim import clip_fresh_gradients

        return float(clip_fresh_gradients(optimizer, math.inf if clip is None else clip))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    norm = torch.nn.utils.get_total_norm(gradients)
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
    return float(norm)
