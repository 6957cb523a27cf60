"""What a user may choose about a run: precision, parallel degrees, batch, checkpointing. Every value checks itself."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.memory._shapes import ITEMSIZE
from traces.errors import GradreelError

CHECKPOINTING = ("none", "selective", "full")
ATTENTION = ("flash", "eager")


@dataclass(frozen=True)
class Precision:
    """Dtypes by name.

    `weights` None: the model's own. `gradients` None: each parameter's own. `accumulation`: gradients of several
    micro-steps are added up in a buffer of this dtype, and the gradient that backward makes lives for one parameter at
    a time; None: they are added up where they are. `master`: the optimizer steps a second copy of the weights in this
    dtype; None: it steps the weights themselves.
    """

    weights: str | None = None
    gradients: str | None = None
    accumulation: str | None = None
    master: str | None = None

    def __post_init__(self) -> None:
        for name in ("weights", "gradients", "accumulation", "master"):
            value = getattr(self, name)
            if value is not None and value not in ITEMSIZE:
                raise GradreelError(f"precision {name} is {value!r}; allowed: {', '.join(ITEMSIZE)}")


@dataclass(frozen=True)
class Parallel:
    """Degrees of parallelism; the world has `data * fsdp * tensor * pipeline` ranks.

    `fsdp`: ranks that share weights, gradients and state along axis 0 (FSDP2). `data`: replicas of that. `expert`:
    ranks, taken from those of `data * fsdp`, that share the experts of a layer; `fsdp` goes on sharding what is left
    of them. `tensor`: ranks that share heads, hidden widths and vocabulary. `pipeline`: stages of layers.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "fsdp", "expert", "tensor", "pipeline"):
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise GradreelError(f"parallel degree {name} is {degree!r}; allowed: an integer of at least 1")
        if (self.data * self.fsdp) % self.expert:
            raise GradreelError(
                f"expert degree {self.expert} does not divide data x fsdp = {self.data} x {self.fsdp} = "
                f"{self.data * self.fsdp} ranks, from which it is taken"
            )
        if self.fsdp % self.expert and self.expert % self.fsdp:
            raise GradreelError(
                f"expert degree {self.expert} and fsdp degree {self.fsdp} do not fit into each other; make one a "
                "multiple of the other"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.data * self.fsdp * self.tensor * self.pipeline

    def describe(self) -> str:
        """The degrees above 1, such as `fsdp 8 x expert 8`; `one GPU` where there is none."""
        words = [f"{n} {getattr(self, n)}" for n in ("pipeline", "tensor", "data", "fsdp") if getattr(self, n) > 1]
        text = " x ".join(words) or "one GPU"
        return text if self.expert == 1 else f"{text}, expert {self.expert}"


@dataclass(frozen=True)
class Run:
    """One training run, apart from model and recipe.

    `batch` sequences of `sequence` tokens make one micro-step on one data-parallel rank; `micro_steps` of them are
    accumulated. `checkpointing`: "none"; "selective" keeps all but what is inside feed-forward layers and experts;
    "full" keeps the input of each block. `attention`: "flash" keeps no scores, "eager" keeps them. `offload`:
    optimizer state (momentum kept apart from gradients, too) and master weights live on the host.
    `hidden_momentum`: "attached" (the gradient of routed experts is added onto their momentum, as in one process) or
    "apart". `step`: "ours" or "original", whose temporaries are counted. `keep_logits`: the loop still holds the
    logits while the optimizer steps.
    """

    batch: int = 1
    sequence: int = 2048
    micro_steps: int = 1
    checkpointing: str = "none"
    attention: str = "flash"
    offload: bool = False
    hidden_momentum: str = "attached"
    step: str = "ours"
    keep_logits: bool = True

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "micro_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise GradreelError(f"{name} is {value!r}; allowed: an integer of at least 1")
        choices = {
            "checkpointing": CHECKPOINTING,
            "attention": ATTENTION,
            "hidden_momentum": ("attached", "apart"),
            "step": ("ours", "original"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise GradreelError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")
