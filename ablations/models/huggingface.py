"""Any mixture-of-experts language model of Hugging Face transformers, by its configuration. Needs no torch to name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from traces.errors import GradreelError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class HuggingFace:
    """`architecture` is a class of transformers such as "DeepseekV4ForCausalLM", `config` its configuration's entries.

    Weights are drawn from torch's global generator: nothing is downloaded.
    """

    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    def to_dict(self) -> dict[str, Any]:
        """The model as plain values for JSON."""
        return asdict(self)

    def build(self) -> torch.nn.Module:
        """The model with fresh weights. Errors: GradreelError where transformers or the architecture is missing."""
        import torch

        try:
            import transformers
        except ImportError:
            raise GradreelError(
                f"model {self.architecture} needs transformers; install it with: pip install 'gradreel[hf]'"
            ) from None
        kind = getattr(transformers, self.architecture, None)
        if kind is None:
            raise GradreelError(
                f"transformers {transformers.__version__} has no {self.architecture}; install a newer one"
            )
        config = kind.config_class(**dict(self.config))
        return kind(config).to(getattr(torch, self.dtype))
