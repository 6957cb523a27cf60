"""Making one run: build, train, measure, write. What a worker does with a job."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from ablations.runner._provenance import provenance
from ablations.runner._spec import ALL, EXPERTS, Finished, RunSpec
from ablations.runner._store import finished, put_run, read_run_frame
from traces.errors import GradreelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ablations.data._open import Text
    from ablations.runner.distributed import Ranks
    from ablations.train import StepReport

    Call = Callable[[nn.Module, dict[str, Tensor]], Any]

DELTA_RMS = "delta_rms"
VALID_LOSS = "valid_loss"


def execute(
    spec: RunSpec, root: str | Path, *, progress: Callable[[int], None] | None = None, ranks: Ranks | None = None
) -> Finished:
    """Make the run `spec` and keep it in its folder of `root`, unless it is there already; return what is known of it.

    `progress` gets each step's number. A loss that is not finite ends the run and is a result like any other. With
    `ranks` this process is one of several that make the run together; the first of them evaluates and writes.
    """
    known = finished(root, spec.id)
    if known is not None:
        return known
    import torch

    from ablations.data import open_data
    from ablations.models import build_model
    from ablations.runner._reel import routed_as
    from ablations.train import Schedule, train
    from toolkit.optim import make_optimizer
    from toolkit.variants import recipe

    began = time.perf_counter()
    data = spec.data_spec()
    text = open_data(data.source, data.options)
    torch.manual_seed(spec.seed)
    model, call = build_model(spec.model_config())
    _check_vocabulary(model, text, data.source)
    model.to(spec.device)
    weights_sha256 = hash_of_weights(model)
    built = recipe(spec.recipe, lr=spec.lr)
    optimizer = make_optimizer(model, built, seed=spec.seed, hidden_momentum="apart")
    moves = Moves(model, optimizer, _targets(root, spec.matched), measured=spec.measured)
    batches = Batches(text, spec)
    trained, train_call, share = (model, call, batches) if ranks is None else ranks.shared(model, call, batches)
    first = ranks is None or ranks.first
    stops = _evaluation_steps(spec)
    valid = _Validation(text, spec, call)
    rows: list[dict[str, Any]] = []

    def after(report: StepReport) -> None:
        if first and report.step in stops:
            rows.append(valid.row(model, report.step, last=report.step == spec.steps))
        if progress is not None:
            progress(report.step)

    with routed_as(spec, root, model, optimizer):
        result = train(
            trained,
            optimizer,
            share,
            spec.steps,
            schedule=Schedule(spec.steps, spec.warmup, spec.floor, spec.schedule),
            clip=spec.clip,
            accumulation=spec.accumulation,
            call=train_call,
            progress=after,
        )
    windows: np.ndarray | None = valid.windows if result.diverged_at is None else None
    final = None if windows is None or not np.isfinite(windows).all() else float(windows.mean())
    if final is None:
        step = result.diverged_at or spec.steps
        rows = [row for row in rows if row["step"] < step]
        rows.append({"step": step, "metric": VALID_LOSS, "value": None, "flag": "diverged", "unit": valid.unit})
    constants = {"run": spec.id, "arm": spec.recipe, "seed": spec.seed, "recipe": built.name}
    everything = [*result.rows(spec.id, spec.recipe, spec.seed), *rows, *moves.rows()]
    found = Finished(
        id=spec.id,
        spec=spec.to_dict(),
        final_loss=final,
        diverged_at=None if final is not None else result.diverged_at or spec.steps,
        weights_sha256=weights_sha256,
        batches_sha256=batches.digest(),
        window_losses=() if final is None or windows is None else tuple(float(w) for w in windows),
        data=_short(text.provenance),
        seconds=round(time.perf_counter() - began, 3),
        provenance=provenance(spec.device),
    )
    if first:
        put_run(root, found, ({**constants, **row} for row in everything))
    return found


class Moves:
    """The size of every step's weight change, and, with `targets`, its being scaled to theirs.

    Sizes are RMS over one parameter (all experts of a stack), of the routed experts' or of all, as `measured` says.
    `targets` maps a parameter's name to the sizes of steps 1, 2, ...; a step past their end, and one without a change,
    is left alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        targets: dict[str, list[float]] | None,
        *,
        measured: str = EXPERTS,
    ) -> None:
        from traces.roles import describe_params, named_parameters

        infos = {
            info.name: info
            for info in describe_params(model)
            if info.tied_to is None and (measured == ALL or info.role == measured)
        }
        own = named_parameters(model)
        self._parameters = {name: own[name] for name in infos}
        self._infos, self._targets = infos, targets
        if targets is not None and set(targets) != set(infos):
            raise GradreelError("the run to match has other parameters than this one; matched runs share one model")
        self._before: dict[str, Tensor] = {}
        self._sizes: dict[str, list[float]] = {name: [] for name in infos}
        optimizer.register_step_pre_hook(self._remember)
        optimizer.register_step_post_hook(self._measure)

    def _remember(self, *_: Any) -> None:
        import torch

        for name, parameter in self._parameters.items():
            old = self._before.get(name)
            if old is None:
                self._before[name] = parameter.detach().to(torch.float32, copy=True)
            else:
                old.copy_(parameter.detach())

    def _measure(self, *_: Any) -> None:
        import torch

        for name, parameter in self._parameters.items():
            weight, before = parameter.detach(), self._before[name]
            delta = weight - before
            flat = delta.flatten()
            size = math.sqrt(float(torch.dot(flat, flat)) / flat.numel())
            sizes = self._sizes[name]
            if self._targets is not None and size > 0 and len(sizes) < len(self._targets[name]):
                wanted = self._targets[name][len(sizes)]
                weight.copy_(before.add_(delta, alpha=wanted / size))
                size = wanted
            sizes.append(size)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per parameter and step."""
        for name, sizes in self._sizes.items():
            info = self._infos[name]
            for step, size in enumerate(sizes, start=1):
                yield {
                    "step": step,
                    "param": name,
                    "role": info.role,
                    "layer": info.layer,
                    "expert": info.expert,
                    "metric": DELTA_RMS,
                    "value": size,
                    "unit": "weight",
                }


class Batches:
    """The batches of a run by (step, micro-step), and a digest of all that were asked for."""

    def __init__(self, text: Text, spec: RunSpec) -> None:
        self._text, self._spec, self._seen = text, spec, hashlib.sha256()

    def __call__(self, step: int, micro_step: int) -> dict[str, Tensor]:
        spec = self._spec
        batch = self._text.batch(spec.seed, step, spec.batch, spec.length, micro_step)
        # A run that diverged saw less than the others, so the digest is that of the first step alone.
        if step == 1:
            for name in sorted(batch):
                self._seen.update(batch[name].numpy().tobytes())
        return {name: value.to(spec.device) for name, value in batch.items()}

    def digest(self) -> str:
        """sha256 of the batches of the first step."""
        return self._seen.hexdigest()


class _Validation:
    """Losses on the fixed validation windows; `windows` are those of the last full pass, nats per byte [N]."""

    unit = "nats"

    def __init__(self, text: Text, spec: RunSpec, call: Call) -> None:
        self._call, self._bytes_per_token = call, text.bytes_per_token
        self._batches = [
            {name: value.to(spec.device) for name, value in batch.items()}
            for batch in text.valid_batches(spec.eval_batches, spec.eval_batch, spec.length)
        ]
        self.windows: np.ndarray | None = None

    def row(self, model: nn.Module, step: int, *, last: bool) -> dict[str, Any]:
        """The mean loss as a row: over all windows after the last step, over a quarter of them before."""
        from ablations.train import window_losses

        # Every fourth, so that a part is as mixed as the whole.
        windows = window_losses(model, self._batches if last else self._batches[::4], call=self._call)
        windows = windows / self._bytes_per_token
        if last:
            self.windows = windows
        tokens = windows.size * self._batches[0]["labels"].shape[1]
        return {
            "step": step,
            "metric": VALID_LOSS,
            "value": float(windows.mean()),
            "support": float(tokens),
            "unit": self.unit,
        }


def _check_vocabulary(model: nn.Module, text: Text, source: str) -> None:
    """An id past the embedding would be an index error in the middle of a run, or on a GPU worse."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    rows = int(embedding.weight.shape[0])
    if rows < text.vocab_size:
        raise GradreelError(
            f"data source {source} has a vocabulary of {text.vocab_size}, the model an embedding of {rows}; set "
            f"model.vocab_size to at least {text.vocab_size}, or another tokenizer"
        )


def hash_of_weights(model: nn.Module) -> str:
    """sha256 over names and bytes of all parameters and buffers."""
    import torch

    state = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def _evaluation_steps(spec: RunSpec) -> frozenset[int]:
    return frozenset(max(1, round(spec.steps * k / spec.evaluations)) for k in range(1, spec.evaluations + 1))


def _targets(root: str | Path, run_id: str | None) -> dict[str, list[float]] | None:
    """Sizes of weight change by parameter of the finished run `run_id`."""
    if run_id is None:
        return None
    known = finished(root, run_id)
    if known is None:
        raise GradreelError(f"run {run_id}, whose weight changes are to be matched, is not in {str(root)!r}; make it")
    frame = read_run_frame(root, run_id).filter(pl.col("metric") == DELTA_RMS).sort("param", "step")
    return {str(name): part["value"].to_list() for (name,), part in frame.group_by(["param"], maintain_order=True)}


def _short(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Of a text's provenance what is short: no list of its files."""
    return {key: value for key, value in provenance.items() if not isinstance(value, (list, dict))}
