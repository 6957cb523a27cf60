"""Two processes: DDP averages fresh gradients only, FSDP2 steps shards or gathers, resuming is bit-equal."""

from __future__ import annotations

import gc
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

#: Whose update is not continuous in the gradient, or whose singular vectors' signs are free.
UNSTEADY = ("galore", "lion", "sage_sinkhorn")
STEPS = 4


class Bank(nn.Module):
    """Three experts on two ranks do not divide evenly; five rows of a matrix do not either."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(3, 4, 6).to(dtype))
        self.mix = nn.Parameter(torch.randn(5, 6).to(dtype))
        self.scale = nn.Parameter(torch.ones(6).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("emn,tn->tem", self.experts, x * self.scale).tanh().sum((1, 2))
        return (hidden + (x @ self.mix.T).tanh().sum(1)).square().mean()


def groups(bank: Any) -> list[dict[str, Any]]:
    return [
        {"params": [("experts", bank.experts)], "role": "routed_expert"},
        {"params": [("mix", bank.mix), ("scale", bank.scale)], "role": "attention"},
    ]


def data(step: int, rank: int | None, dtype: torch.dtype = torch.float32) -> Tensor:
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
    return whole if rank is None else whole[rank * 4 : rank * 4 + 4]


def alone(name: str) -> list[Tensor]:
    from toolkit.optim import RecipeOptimizer

    bank = Bank()
    optimizer = RecipeOptimizer(groups(bank), name, lr=1e-2, hidden_momentum="apart")
    for step in range(STEPS):
        bank(data(step, None)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in bank.parameters()]


def _ddp(rank: int) -> None:
    from toolkit.optim import RecipeOptimizer
    from traces.errors import GradreelError

    for name in ("mesh", "skewadam"):
        bank = Bank()
        wrapped = nn.parallel.DistributedDataParallel(bank)
        optimizer = RecipeOptimizer(groups(bank), name, lr=1e-2)
        for step in range(STEPS):
            wrapped(data(step, rank)).backward()
            assert bank.experts.grad is not None, "auto keeps the gradient apart from history in several processes"
            optimizer.step()
            optimizer.zero_grad()
        for mine, want in zip(bank.parameters(), alone(name), strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(GradreelError, match="'attached' with several processes"):
        RecipeOptimizer(groups(Bank()), "mesh", hidden_momentum="attached")
    _comm_hooks(rank)


def _sum(state, bucket):  # DDP compares annotations with its own types
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


def _comm_hooks(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

    from toolkit.optim import make_optimizer
    from traces.errors import GradreelError

    def wrapped() -> Any:
        return nn.parallel.DistributedDataParallel(Bank())

    for hook in (allreduce_hook, fp16_compress_hook):
        net = wrapped()
        net.register_comm_hook(None, hook)
        make_optimizer(net, "mesh", roles={"experts": "routed_expert"})
    summing = wrapped()
    summing.register_comm_hook(None, _sum)
    with pytest.raises(GradreelError, match="DDP has the communication hook _sum; hidden momentum allows"):
        make_optimizer(summing, "mesh", roles={"experts": "routed_expert"})
    make_optimizer(summing, "adamw", roles={"experts": "routed_expert"})
    late = wrapped()
    optimizer = make_optimizer(late, "mesh", roles={"experts": "routed_expert"})
    late.register_comm_hook(None, _sum)
    late(data(0, rank)).backward()
    with pytest.raises(GradreelError, match="communication hook _sum"):
        optimizer.step()


def _fsdp(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from toolkit.optim import RecipeOptimizer, clip_fresh_gradients
    from toolkit.recipes import RECIPES

    mesh = init_device_mesh("cpu", (2,))

    def run(bank: Any, optimizer: Any, steps: range, dtype: torch.dtype = torch.float32) -> None:
        for step in steps:
            bank(data(step, rank, dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, RecipeOptimizer]:
        bank: Any = Bank(dtype)
        fully_shard(bank, mesh=mesh)
        return bank, RecipeOptimizer(groups(bank), name, lr=1e-2)

    bank, optimizer = make("mesh")
    bank(data(0, rank)).backward()
    whole = Bank()
    whole(data(0, None)).backward()
    torch.testing.assert_close(
        clip_fresh_gradients(optimizer, 0.5),
        clip_fresh_gradients(RecipeOptimizer(groups(whole), "mesh", hidden_momentum="apart"), 0.5),
    )
    for mine, other in zip(bank.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)

    # The last one joins experts, so its shards are gathered.
    for name in (*RECIPES.names(), "skewadam(paper_exact=True)"):
        if name not in UNSTEADY:
            bank, optimizer = make(name)
            run(bank, optimizer, range(STEPS))
            for mine, want in zip(bank.parameters(), alone(name), strict=True):
                torch.testing.assert_close(mine.full_tensor(), want, rtol=1e-3, atol=2e-5, msg=name)

        for dtype in (torch.float32, torch.bfloat16):
            unbroken, optimizer = make(name, dtype)
            run(unbroken, optimizer, range(2), dtype)
            path = Path(folder) / f"{rank}.pt"
            torch.save(([p.to_local() for p in unbroken.parameters()], optimizer.state_dict()), path)
            run(unbroken, optimizer, range(2, STEPS), dtype)
            weights, state = torch.load(path, weights_only=True)
            resumed, again = make(name, dtype)
            with torch.no_grad():
                for parameter, weight in zip(resumed.parameters(), weights, strict=True):
                    parameter.to_local().copy_(weight)
            again.load_state_dict(state)
            run(resumed, again, range(2, STEPS), dtype)
            for one, other in zip(unbroken.parameters(), resumed.parameters(), strict=True):
                assert torch.equal(one.to_local(), other.to_local()), (name, dtype)


def _worker(rank: int, port: int, folder: str, what: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        _ddp(rank) if what == "ddp" else _fsdp(rank, folder)
        # No rank may leave while gloo's threads still serve the other, nor models outlive their groups: both abort.
        gc.collect()
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("what", ["ddp", "fsdp"])
def test_two_processes(what: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A spawned process imports this file by its folder's path.
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        module = __import__("test_optim_processes")
        mp.spawn(module._worker, args=(port, str(tmp_path), what), nprocs=2)
    finally:
        sys.path.remove(str(Path(__file__).parent))
