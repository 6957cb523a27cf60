"""Where the gradient of a step lies when it is not in `parameter.grad`: DeepSpeed's and Megatron's own buffers.

    with Recorder("run.trace", model, gradients=MegatronGradients(model, optimizer)) as reel:
        ...
        reel.before_step()   # on every rank: gradients are reduced, the optimizer has not stepped
        optimizer.step()

Such frameworks step flat copies of the parameters inside an optimizer of their own, so that no hook of torch fires with
the model's parameters. A `GradientSource` answers for them; another framework needs one more class with these methods.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from traces.errors import GradreelError
from traces.placements import Placement


@runtime_checkable
class GradientSource(Protocol):
    """What a recorder asks of a framework, on every rank, between the reduction of the gradients and the step.

    `communicates`: `gradient` waits for other ranks. Then every rank must record the same steps, so the recorder takes
    neither a budget nor `when_full="drop"`.
    """

    communicates: bool

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This step's reduced, unscaled gradient, laid out as the parameter on this rank; None where there is none."""

    def part(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> tuple[Placement, tuple[int, ...]] | None:
        """Where a parameter of shape `shape` lies in the whole one, and the shape of that; None where it is whole."""

    def writes(self, parameter: nn.Parameter) -> bool:
        """Whether this rank records the parameter: of ranks that hold the same values one must."""

    def rates(self) -> list[Any]:
        """Learning rates; one is told for all parameters, of several the list."""


class MegatronGradients:
    """Megatron-LM (megatron-core): gradients are added up in `parameter.main_grad`.

    Call `reel.before_step()` after `finalize_model_grads`, when each data-parallel rank holds the reduced gradient; it
    is divided by the loss scale here, and not yet clipped. `model` is the module, or the list of its pipeline chunks;
    `optimizer` the MegatronOptimizer. Of replicas the first data-parallel rank writes; parameters with
    `allreduce = False` are experts, whose replicas are the expert-data group. Tensor-parallel parts are told by
    `tensor_model_parallel` and `partition_dim`. Expert and pipeline ranks count what they hold from 0: give
    `layout=Layout(..., global_expert_ids=...)` and `global_names=...`. Refused: the distributed optimizer, which leaves
    a rank a share of the gradient buffer and not of a parameter; partitions with a stride.
    """

    communicates = False

    def __init__(self, model: nn.Module | Iterable[nn.Module], optimizer: Any, *, parallel_state: Any = None) -> None:
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        if any(getattr(getattr(c, "ddp_config", None), "use_distributed_optimizer", False) for c in chunks):
            raise GradreelError(
                "Megatron's distributed optimizer leaves each rank a share of the gradient buffer, not of a parameter; "
                "record a run without --use-distributed-optimizer"
            )
        self._optimizer = optimizer
        self._state = parallel_state or _need("megatron.core.parallel_state", "megatron-core")

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """`main_grad`, or `.grad` where the run has no gradient buffers."""
        gradient = getattr(parameter, "main_grad", None)
        if gradient is None:
            gradient = parameter.grad
        scale = getattr(self._optimizer, "get_loss_scale", None)
        if gradient is None or not callable(scale):
            return gradient
        factor = scale()  # a tensor of one element on the device: dividing waits for nothing
        return gradient / (factor.reshape(()) if isinstance(factor, Tensor) else factor)

    def part(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> tuple[Placement, tuple[int, ...]] | None:
        """The stretch along `partition_dim` of a tensor-parallel parameter."""
        ranks = int(self._state.get_tensor_model_parallel_world_size())
        if ranks == 1 or not getattr(parameter, "tensor_model_parallel", False):
            return None
        axis, stride = int(getattr(parameter, "partition_dim", -1)), int(getattr(parameter, "partition_stride", 1))
        if not 0 <= axis < len(shape) or stride != 1:
            raise GradreelError(
                f"a tensor-parallel parameter of shape {shape} has partition_dim {axis} and partition_stride {stride}; "
                "allowed: an axis of it, and stride 1"
            )
        rank = int(self._state.get_tensor_model_parallel_rank())
        whole = (*shape[:axis], shape[axis] * ranks, *shape[axis + 1 :])
        return Placement({axis: ((rank * shape[axis], shape[axis]),)}), whole

    def writes(self, parameter: nn.Parameter) -> bool:
        """The first of the ranks that hold the same values."""
        is_expert = not getattr(parameter, "allreduce", True)
        rank = self._state.get_expert_data_parallel_rank() if is_expert else self._state.get_data_parallel_rank()
        split = is_expert or getattr(parameter, "tensor_model_parallel", False)
        return rank == 0 and (split or self._state.get_tensor_model_parallel_rank() == 0)

    def rates(self) -> list[Any]:
        """The groups' rates."""
        return [group.get("lr") for group in getattr(self._optimizer, "param_groups", ())]


class DeepSpeedGradients:
    """DeepSpeed's engine, ZeRO stages 0 to 2, through `deepspeed.utils.safe_get_full_grad`.

    Call `reel.before_step()` between `engine.backward(loss)` and `engine.step()`, at the end of accumulation
    (`engine.is_gradient_accumulation_boundary()`). Gradients are those before clipping, still multiplied by a dynamic
    loss scale where the run has one (bf16 and fp32 runs have none). Putting them together is an all-reduce in which
    every rank takes part; rank 0 writes. Weights are the model's own, in its dtype. Refused: stage 3, whose parameters
    have no shape on a rank.
    """

    def __init__(self, engine: Any, *, utils: Any = None) -> None:
        stage = int(engine.zero_optimization_stage())
        if stage == 3:
            raise GradreelError(
                "ZeRO stage 3 leaves a parameter no shape on a rank, so its experts cannot be found; record a run with "
                "stage 1 or 2"
            )
        self._engine, self.communicates = engine, stage > 0
        self._utils = utils or _need("deepspeed.utils", "deepspeed")

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of the whole data-parallel group, in the type of gradient accumulation."""
        found: Tensor | None = self._utils.safe_get_full_grad(parameter)
        return found

    def part(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> tuple[Placement, tuple[int, ...]] | None:
        """Whole on every rank."""
        return None

    def writes(self, parameter: nn.Parameter) -> bool:
        """Rank 0; of DeepSpeed-MoE's experts (`allreduce` False) each rank, its own."""
        return not getattr(parameter, "allreduce", True) or torch.distributed.get_rank() == 0

    def rates(self) -> list[Any]:
        """What the engine's optimizer has."""
        return list(self._engine.get_lr())


class AnnouncedSteps:
    """Stands in for the optimizer of a source: one group of all parameters."""

    def __init__(self, source: GradientSource, parameters: Iterable[nn.Parameter]) -> None:
        self._source, self.defaults, self.state = source, dict[str, Any](), dict[Any, Any]()
        self._parameters = list(parameters)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group; its lr is the source's, where all its groups have the same."""
        rates = self._source.rates()
        return [{"params": self._parameters, "lr": rates[0] if rates and len(set(map(float, rates))) == 1 else None}]

    def fresh_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """This step's gradient."""
        return self._source.gradient(parameter)


def check_source(source: Any, budget: Any, when_full: str, optimizer: Any) -> None:
    """Refuse what is no source, and policies under which ranks would wait for each other."""
    if not isinstance(source, GradientSource):
        raise GradreelError(
            f"gradients is a {type(source).__name__}, not a GradientSource; see traces.gradient_sources for its methods"
        )
    if optimizer is not None:
        raise GradreelError("give gradients= or an optimizer, not both; call reel.before_step() before each step")
    if source.communicates and (budget is not None or when_full == "drop"):
        raise GradreelError(
            f"{type(source).__name__} puts gradients together on all ranks, which must record the same steps; give "
            "RecordAt(budget=None) and when_full='block'"
        )


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise GradreelError(f"{package} is not installed here; install it in the environment you train in") from None
