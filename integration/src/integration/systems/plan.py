"""plan-api: the unmodified model, cut by a plan of the zoo, with all packages that it finds.

It is imported where it is used: the other systems are torch alone.
"""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from integration.errors import UsageError
from integration.models import ModelShape
from integration.systems.base import System, require_divisible, require_vocabulary


class PlanSystem(System):
    """The zoo's plan of a model, by degrees; every rank passes the microbatches of all.

    In float64 losses are the single device's to 2e-15 (llama-tiny, 30 steps).
    """

    name = "plan"
    native = False
    accepts_degrees = True
    accepts_deferred_init = True
    shards_batches = True

    def data_parallel_degree(self, world_size: int) -> int:
        """Returns the data parallel ranks, among which the plan shards what each rank passes."""
        del world_size
        return self.degrees.data

    def dropout_on_dtensors(self, shape: ModelShape) -> bool:
        """Returns True: everything in a layer is a DTensor, or drawn as one by static mode."""
        del shape
        return True

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuses degrees that do not make up the world, or cut a head or an MLP unevenly."""
        self.degrees.check(world_size)
        require_vocabulary(shape, self.degrees)
        if self.degrees.ep > 1:
            if shape.family != "mixtral":
                raise UsageError(
                    f"--ep divides experts, and a {shape.family} has none; leave it out"
                )
            require_divisible(shape, "num_local_experts", self.degrees.ep)
        if self.degrees.cp > 1 and shape.family != "llama":
            raise UsageError(
                f"--cp is for models of family llama, whose attention it knows, not {shape.family}"
            )
        for field in shape.tensor_parallel_sizes:
            require_divisible(shape, field, self.degrees.tp)

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Applies the plan, fully_shard included where parameters are shared along ``dp_shard``."""
        del world_size
        from integration.systems.zoo import plan_of
        from plan_api import parallelize

        axes = self.degrees.axes
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        plan = plan_of(shape, mesh, self.degrees)
        return parallelize(model, plan, mode="static" if self.degrees.static else "eager")

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Reduces gradients in the last microbatch only."""
        from plan_api import installed

        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        return nullcontext() if last else installed(model).gradients.no_sync()
