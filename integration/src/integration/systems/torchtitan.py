"""TorchTitan's way on the parts of stock torch that it is made of; TorchTitan itself is not run."""

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from integration.errors import UsageError
from integration.models import ModelShape
from integration.systems.base import System, require_divisible
from integration.systems.degrees import Degrees
from integration.systems.parallelize_llama import apply_fsdp, apply_tp


class TorchTitanStyle(System):
    """``parallelize_module`` with sequence parallel, then ``fully_shard``, on one mesh."""

    name = "torchtitan-style"
    takes_meta = True
    composes = True
    even_sequences = True
    families = ("llama",)

    def data_parallel_degree(self, world_size: int) -> int:
        """Return the data parallel ranks."""
        del world_size
        return self.degrees.data

    def data_rank(self, rank: int, world_size: int) -> int:
        """Return which of the data parallel ranks this is; those of ``tp`` are side by side."""
        del world_size
        return rank // self.degrees.tp

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuse degrees that TorchTitan's plan does not have, or that the model's sizes lack."""
        degrees = self.degrees
        known = Degrees(
            dp_replicate=degrees.dp_replicate,
            dp_shard=degrees.dp_shard,
            tp=degrees.tp,
            sp=degrees.sp,
            loss_parallel=degrees.loss_parallel,
        )
        if degrees != known:
            others = [option for option in degrees.options if option not in known.options]
            raise UsageError(
                f"system {self.name!r} does not take {' '.join(others)}; leave it out, or use"
                " --system plan"
            )
        degrees.check(world_size)
        if degrees.tp > 1 and not degrees.sp:
            raise UsageError(
                f"system {self.name!r} cuts sequences wherever it cuts weights, by one plan; give"
                f" --sp beside --tp {degrees.tp}"
            )
        if degrees.dp_replicate > 1 and degrees.dp_shard == 1:
            raise UsageError(
                f"system {self.name!r} copies parameters along --dp-replicate"
                f" {degrees.dp_replicate} beside --dp-shard only; give it as well, or use"
                " --system ddp"
            )
        for field in (*shape.cut_by_heads, "vocab_size"):
            require_divisible(shape, field, degrees.tp)

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Distribute the weights in place and install the hooks."""
        del shape, world_size
        degrees = self.degrees
        sizes = (degrees.dp_replicate, degrees.dp_shard, degrees.tp)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        if degrees.tp > 1:
            apply_tp(model, mesh["tp"], loss_parallel=degrees.loss_parallel)
        if degrees.dp_shard > 1:
            copied = degrees.dp_replicate > 1
            apply_fsdp(model, mesh["dp_replicate", "dp_shard"] if copied else mesh["dp_shard"])
        return model

    @contextlib.contextmanager
    def microbatch(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Reduce-scatter in the last microbatch only, and take a loss of cut logits."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        with loss_parallel() if self.degrees.loss_parallel else contextlib.nullcontext():
            yield
