"""Parameters that data parallel ranks share, in TorchTitan's way."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def apply_fsdp(model: nn.Module, layers: str, mesh: DeviceMesh) -> None:
    """Shares parameters: a group for each layer, and one for all that is in none.

    TorchTitan has groups for embedding, norm and output as well. An embedding that is cut returns a
    view, of which FSDP2 warns where it ends a group.

    Args:
        model: after its ``apply_tp`` where there is one.
        layers: path of the list of its layers.
        mesh: one axis, or one of copies and one of parts (HSDP).
    """
    for layer in model.get_submodule(layers).children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
