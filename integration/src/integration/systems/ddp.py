"""DistributedDataParallel: replicates the model and averages gradients in buckets."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from integration.models import ModelShape
from integration.systems.base import AUTOCAST_DTYPES, System


class DataParallel(System):
    """``torch.nn.parallel.DistributedDataParallel``."""

    name = "ddp"
    supports_documents = True
    supports_all_optimizers = True
    supports_compile = True
    compute_dtypes = AUTOCAST_DTYPES

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Wraps the model over the default group."""
        del world_size
        self.autocast(model)
        return DistributedDataParallel(model)

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Keeps gradients local until the last microbatch."""
        assert isinstance(model, DistributedDataParallel)
        context: AbstractContextManager[object] = nullcontext() if last else model.no_sync()
        return context
