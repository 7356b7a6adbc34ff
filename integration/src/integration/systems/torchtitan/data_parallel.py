"""Shards parameters over data parallel ranks as TorchTitan does."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def apply_fsdp(model: nn.Module, layers: str, mesh: DeviceMesh) -> None:
    """Applies fully_shard to each layer and to the root.

    TorchTitan also has parameter groups for embedding, norm and output layer. A sharded embedding
    returns a view, for which FSDP2 warns at the end of a group.

    Args:
        model: the model, after its ``apply_tp`` if any.
        layers: path of the list of its layers.
        mesh: one axis, or a replicate and a shard axis (HSDP).
    """
    for layer in model.get_submodule(layers).children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
