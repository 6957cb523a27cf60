"""One run by several processes, each with its share of every batch: what the executor `torchrun` starts.

Losses of a step are means over the ranks, each over its own tokens. A router's balance loss is of a rank's tokens as
well, as in other data-parallel training, so with it the run is not that of one process. Sums differ in their roundings.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.errors import GradreelError

if TYPE_CHECKING:
    from torch import Tensor, nn

    Call = Callable[[nn.Module, dict[str, Tensor]], Any]
    Batches = Callable[[int, int], dict[str, Tensor]]


@dataclass(frozen=True)
class Ranks:
    """This process among those that make a run."""

    rank: int
    count: int

    @property
    def first(self) -> bool:
        """Whether this is the one that evaluates and writes."""
        return self.rank == 0

    def shared(self, model: nn.Module, call: Call, batches: Batches) -> tuple[nn.Module, Call, Batches]:
        """The model with averaged gradients, a call whose losses are means over ranks, and this rank's sequences."""
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        def mean(value: Tensor) -> Tensor:
            value = value.detach().clone()
            dist.all_reduce(value)
            return value / self.count

        def called(wrapped: nn.Module, batch: dict[str, Tensor]) -> Any:
            out = call(wrapped, batch)
            return out._replace(cross_entropy=mean(out.cross_entropy), aux_loss=mean(out.aux_loss))

        def share(step: int, micro_step: int) -> dict[str, Tensor]:
            return {name: value[self.rank :: self.count] for name, value in batches(step, micro_step).items()}

        return DistributedDataParallel(model), called, share


def main() -> None:
    """Make the run that the JSON file named on the command line describes; its error, if any, goes beside that file."""
    import torch
    import torch.distributed as dist

    from ablations.runner._execute import execute
    from ablations.runner._spec import RunSpec
    from ablations.runner.worker import load_plugins
    from traces.console import one_line

    file = Path(sys.argv[1])
    job = json.loads(file.read_text(encoding="utf-8"))
    spec = RunSpec.from_dict(job["spec"])
    cuda = spec.device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    try:
        load_plugins(job["plugins"], set())
        if spec.batch % ranks.count:
            raise GradreelError(f"a batch of {spec.batch} cannot be dealt to {ranks.count} processes; choose a divisor")
        if spec.routing is not None:
            raise GradreelError("recorded routing is for one process; use executor local")
        execute(spec, job["root"], ranks=ranks)
        dist.barrier()
    except (GradreelError, OSError) as error:
        if ranks.first:
            file.with_suffix(".error").write_text(one_line(error), encoding="utf-8")
        sys.exit(1)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
