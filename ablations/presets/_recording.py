"""What a file states that is trained once, recorded, and replayed. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ablations.models.config import MoEConfig
from traces.errors import GradreelError

if TYPE_CHECKING:
    import torch

    from toolkit.recipes import Recipe
    from traces.record_at import RecordAt


@dataclass(frozen=True)
class Recording:
    """What an experiment file exports as `ABLATION`.

    `question` is what the run is meant to answer, `decides` what would answer it. The model is trained on the offline
    corpus with AdamW (the baseline), `batch` sequences of `length` bytes a step, peak `lr` reached after `warmup` steps
    and then a cosine. `arms` are the recipes the recorded run is replayed through, `metrics` what is measured on them,
    `per_expert` those of which the frame keeps a row per expert instead of summaries over experts.
    """

    name: str
    question: str
    decides: str
    model: MoEConfig
    arms: tuple[str, ...]
    metrics: tuple[str, ...]
    steps: int
    warmup: int
    batch: int
    length: int
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    baseline: str = "adamw"
    roles: tuple[str, ...] = ("router", "routed_expert")
    per_expert: tuple[str, ...] = ("expert_load", "tokens_per_expert")

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length"):
            if getattr(self, name) < 1:
                raise GradreelError(f"preset {self.name}: {name} is {getattr(self, name)}; allowed: at least 1")
        if not 0 <= self.warmup <= self.steps:
            raise GradreelError(f"preset {self.name}: warmup is {self.warmup}; allowed: [0, steps = {self.steps}]")
        if self.length > self.model.max_positions:
            limit = self.model.max_positions
            raise GradreelError(f"preset {self.name}: length is {self.length}; allowed: up to max_positions = {limit}")
        if self.baseline not in self.arms:
            raise GradreelError(f"preset {self.name}: baseline {self.baseline!r} is not among its arms")

    def shortened(self, steps: int) -> Recording:
        """The same experiment over `steps` steps, with at most a tenth of them for warm-up."""
        return replace(self, steps=steps, warmup=min(self.warmup, steps // 10))

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """torch's own AdamW on every parameter, as one group."""
        import torch

        return torch.optim.AdamW(model.parameters(), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)

    def trained_recipe(self) -> Recipe:
        """The recipe that says what `optimizer` does."""
        from toolkit.variants import recipe

        return recipe("adamw", lr=self.lr, betas=self.betas, weight_decay=self.weight_decay)

    def recipes(self) -> dict[str, Recipe]:
        """The arms by name, the baseline first, with the options it was trained with."""
        from toolkit.variants import recipe

        rest = [name for name in self.arms if name != self.baseline]
        return {self.baseline: self.trained_recipe()} | {name: recipe(name) for name in rest}

    def record_at(self) -> RecordAt:
        """Every step, with the full gradient of every expert."""
        from traces.record_at import RecordAt

        return RecordAt(every=1, roles=self.roles)

    @property
    def summary(self) -> str:
        """One line for lists."""
        return self.question

    def to_dict(self) -> dict[str, Any]:
        """The preset as plain values, for the provenance of what it produced."""
        return {
            "preset": self.name,
            "question": self.question,
            "model": self.model.to_dict(),
            "steps": self.steps,
            "tokens_per_step": self.batch * self.length,
            "lr": self.lr,
            "warmup": self.warmup,
            "betas": list(self.betas),
            "weight_decay": self.weight_decay,
            "clip": self.clip,
            "seed": self.seed,
            "arms": list(self.arms),
        }
