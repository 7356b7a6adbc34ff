"""The system `torchtitan-style`, which calls the functions of a model's family."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from integration.errors import UsageError
from integration.models import ModelShape
from integration.systems.base import System, require_vocabulary
from integration.systems.degrees import Degrees
from integration.systems.divisors import require_divisors
from integration.systems.torchtitan import dit, llama, mixtral
from integration.systems.torchtitan.data_parallel import apply_fsdp

#: By family; called with a model and a mesh, for models of text also with ``loss_parallel``.
APPLY_TP: Mapping[str, Callable[..., None]] = {
    "llama": llama.apply_tp,
    "mixtral": mixtral.apply_tp,
    "dit": dit.apply_tp,
}
_ATTENTION = ("num_attention_heads", "num_key_value_heads", "vocab_size")
# Fields of the models' shapes that the degree has to divide.
_DIVISIBLE = {
    "llama": (*_ATTENTION, "intermediate_size"),
    "mixtral": (*_ATTENTION, "num_local_experts"),
    "dit": ("hidden_size",),
}


class TorchTitanStyle(System):
    """``parallelize_module`` with sequence parallelism, then ``fully_shard``, on one mesh."""

    name = "torchtitan-style"
    accepts_meta_model = True
    accepts_degrees = True
    needs_even_sequences = True
    families = tuple(APPLY_TP)

    def data_parallel_degree(self, world_size: int) -> int:
        """Returns the data parallel degree."""
        del world_size
        return self.degrees.data

    def data_rank(self, rank: int, world_size: int) -> int:
        """Returns the data parallel rank; ranks of ``tp`` are adjacent."""
        del world_size
        return rank // self.degrees.tp

    def dist_rng_draws_dropout(self, shape: ModelShape) -> bool:
        """Returns whether it does after attention and MLP; attention itself is on local tensors."""
        return shape.family == "dit" and self.degrees.tp > 1

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuses degrees that TorchTitan's plan does not have, or that do not divide the model."""
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
                f"system {self.name!r}: expected --sp with --tp {degrees.tp}, as its plan includes"
                " sequence parallelism; give --sp as well"
            )
        if degrees.dp_replicate > 1 and degrees.dp_shard == 1:
            raise UsageError(
                f"system {self.name!r}: expected --dp-shard with --dp-replicate"
                f" {degrees.dp_replicate}, got none; give it as well, or use --system ddp"
            )
        require_vocabulary(shape, degrees)
        fields = _DIVISIBLE[shape.family]
        require_divisors(shape, fields, "--tp", degrees.tp, degrees.fitting("tp"))

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Distributes the weights in place and installs the hooks."""
        del world_size
        degrees = self.degrees
        sizes = (degrees.dp_replicate, degrees.dp_shard, degrees.tp)
        mesh = init_device_mesh(
            self.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp")
        )
        if degrees.tp > 1:
            options = {"loss_parallel": True} if degrees.loss_parallel else {}
            APPLY_TP[shape.family](model, mesh["tp"], **options)
        if degrees.dp_shard > 1:
            copied = degrees.dp_replicate > 1
            data = mesh["dp_replicate", "dp_shard"] if copied else mesh["dp_shard"]
            apply_fsdp(model, shape.layers, data)
        return model

    @contextlib.contextmanager
    def microbatch(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Reduce-scatters in the last microbatch only, and enables the loss of sharded logits."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        with loss_parallel() if self.degrees.loss_parallel else contextlib.nullcontext():
            yield
