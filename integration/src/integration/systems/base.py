"""What every system says of itself: how it cuts the work and how it wraps the model."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from integration.errors import UsageError
from integration.models import LlamaShape
from integration.systems.clip import clip_gradients


class System(ABC):
    """One way to train a model on ``world_size`` ranks.

    Attributes:
        name: how users choose it.
        compare_ranks: the ranks on which ``integration.compare`` runs it.
        tolerance: the largest loss difference from one device that the comparison accepts,
            absolute, in nats per token.
    """

    name: str
    compare_ranks: int = 2
    tolerance: float
    # Whether parallelize() takes a model on the meta device, whose weights are drawn later.
    takes_meta: bool = False
    # Whether it trains with optimizers of blocks and matrices too, which need parameters that keep
    # their shapes, whole or as DTensors.
    any_optimizer: bool = False

    def data_parallel_degree(self, world_size: int) -> int:
        """Return how many ranks see different data; the others repeat it."""
        return world_size

    def check(self, world_size: int, shape: LlamaShape) -> None:  # noqa: B027
        """Refuse a world size or a model that the system cannot run, before anything starts.

        Raises:
            UsageError: naming the size that does not fit.
        """

    @abstractmethod
    def parallelize(self, model: nn.Module, world_size: int) -> nn.Module:
        """Return ``model`` ready for training on the default process group.

        Every rank passes the same weights.
        """

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Return the context of one microbatch; gradients are reduced in the ``last`` one."""
        del model, last
        return nullcontext()

    def clip(self, model: nn.Module, most: float) -> Tensor:
        """Scale gradients down to the norm ``most`` where theirs is larger; return theirs."""
        return clip_gradients(model.parameters(), most)


def require_divisible(shape: LlamaShape, field: str, degree: int) -> None:
    """Refuse a ``degree`` that does not divide ``shape.field``.

    Raises:
        UsageError: naming the field, its value and the degree.
    """
    size = getattr(shape, field)
    if size % degree:
        raise UsageError(
            f"{degree} tensor-parallel ranks do not divide {field} = {size};"
            " use a number of ranks that does"
        )
