"""DistributedDataParallel must average gradients under hidden momentum, and nothing may have replaced that."""

from __future__ import annotations

import weakref

from torch import nn

from traces.errors import GradreelError

#: Communication hooks that give the mean over processes, as DDP does without any.
MEANS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


class AveragingCheck:
    """Looks for communication hooks on `model`, if DDP wraps it, and on the wrappers inside.

    Summed gradients grow with the number of processes, and what a custom hook returns (a share of the gradient, an
    error to be fed back) is not this step's gradient, so history would hold something else than it says.
    """

    def __init__(self, model: nn.Module) -> None:
        wrappers = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
        self._wrappers = [weakref.ref(wrapper) for wrapper in wrappers]

    def check(self) -> None:
        """Raise GradreelError where a hook other than the averaging ones is registered."""
        for reference in self._wrappers:
            wrapper = reference()
            for hook, _ in getattr(wrapper, "_comm_hooks", ()):
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                known = getattr(hook, "__module__", "").startswith("torch.distributed.algorithms.ddp_comm_hooks")
                if not (known and name in MEANS):
                    raise GradreelError(
                        f"DDP has the communication hook {name}; hidden momentum allows DDP's own mean or "
                        f"{', '.join(MEANS)}"
                    )
