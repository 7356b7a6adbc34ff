"""plan-api: the unmodified model, cut by a plan of the zoo, with all packages that it finds.

It is imported where it is used: the other systems are torch alone.
"""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from integration.models import LlamaShape
from integration.systems.base import System, require_divisible


class _Planned(System):
    """Every rank is given the whole batch, of which the plan leaves it its part."""

    # In float64 the losses are the single device's to 2e-15 (llama-tiny, 30 steps). In float32 a
    # spike of the loss amplifies rounding: 1.8e-5 at step 43 of llama-10m.
    tolerance = 1e-4

    def data_parallel_degree(self, world_size: int) -> int:
        """Return 1: the plan cuts the batch, not the loader."""
        del world_size
        return 1

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Reduce gradients in the last microbatch only."""
        from plan_api import installed

        return nullcontext() if last else installed(model).gradients.no_sync()


class PlanTensorSequence(_Planned):
    """Tensor and sequence parallelism, on 4 ranks beside data parallelism on 2 x 2."""

    name = "plan-tp-sp"

    def check(self, world_size: int, shape: LlamaShape) -> None:
        """Refuse a degree that cuts a head or the MLP unevenly."""
        _, degree = _degrees(world_size)
        for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            require_divisible(shape, field, degree)

    def parallelize(self, model: nn.Module, world_size: int) -> nn.Module:
        """Apply the zoo's plan of LLaMA."""
        from plan_api import parallelize, zoo

        mesh = _mesh(*_degrees(world_size))
        return parallelize(model, zoo.llama(mesh, dp="dp", sp=True))


class PlanZeroThree(_Planned):
    """ZeRO-3 by the phases of a plan: weights rest sharded and are gathered for their module."""

    name = "plan-zero3"

    def parallelize(self, model: nn.Module, world_size: int) -> nn.Module:
        """Apply the zoo's plan without tensor parallelism, and phases of all weights."""
        from plan_api import Phase, parallelize, zoo

        plan = zoo.llama(_mesh(world_size, 1), tp=None, dp="dp")
        plan.shard(r".*\.weight", Shard(0), "dp")
        plan.shard(r".*\.weight", Replicate(), "dp", Phase.RUN)
        return parallelize(model, plan)


def _degrees(world_size: int) -> tuple[int, int]:
    """Return the ranks of data and of tensor parallelism."""
    return (2, world_size // 2) if world_size >= 4 else (1, world_size)


def _mesh(data: int, tensor: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
