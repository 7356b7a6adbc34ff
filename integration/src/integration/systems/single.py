"""One device: the reference that every other system is compared with."""

from torch import nn

from integration.errors import UsageError
from integration.models import ModelShape
from integration.systems.base import AUTOCAST_DTYPES, System


class SingleDevice(System):
    """The unmodified model; no process group is used."""

    name = "single"
    supports_documents = True
    accepts_meta_model = True
    supports_all_optimizers = True
    supports_compile = True
    supports_precision = True
    compute_dtypes = AUTOCAST_DTYPES

    @property
    def init_on_dtensors(self) -> bool:
        """False: parameters are plain tensors."""
        return False

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuses more than one rank."""
        del shape
        if world_size != 1:
            raise UsageError(
                f"system 'single': expected 1 rank, got {world_size}; use 'ddp' or 'fsdp2'"
            )

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Returns the model as it is."""
        del shape, world_size
        self.autocast(model)
        return model
