"""What every system says of itself: how it cuts the work and how it wraps the model."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from integration.data import Batch, Modality
from integration.errors import UsageError
from integration.models import ModelShape, loss_of
from integration.systems.clip import clip_gradients
from integration.systems.degrees import Degrees


class System(ABC):
    """One way to train a model on ``world_size`` ranks.

    Attributes:
        name: how users choose it.
        degrees: of its axes, for systems that compose several.
        compute_dtype: what is computed in, where it is not the dtype of the weights.
    """

    name: str
    # Whether parallelize() takes a model on the meta device, whose weights are drawn later.
    accepts_meta_model: bool = False
    # Whether its shards are of placements in which torch draws nothing, and dist-rng does.
    needs_dist_rng_for_init: bool = False
    # Whether it takes a model of plan_api.deferred_init, whose weights it draws itself.
    accepts_deferred_init: bool = False
    # Whether its degrees say how many ranks each kind of parallelism has.
    accepts_degrees: bool = False
    # Whether it trains with optimizers of blocks and matrices too, which need parameters that keep
    # their shapes, whole or as DTensors.
    supports_all_optimizers: bool = False
    # Whether its layers can be compiled, each as one graph.
    supports_compile: bool = False
    # Whether it can compute in another dtype than that of the weights.
    mixed_precision: bool = False
    # Whether ranks of tensor parallelism have equal parts of a sequence, or it is refused.
    needs_even_sequences: bool = False
    # Whether it shards microbatches itself: every rank passes those of all data parallel ranks.
    shards_batches: bool = False
    # Whether no package of this repository has a part in it.
    native: bool = True
    # Whether its weights and gradients can be saved, loaded, clipped and looked at.
    supports_checkpoints: bool = True
    # Families of the models that it has been written for; None: any.
    families: tuple[str, ...] | None = None

    def __init__(
        self, degrees: Degrees | None = None, compute_dtype: torch.dtype | None = None
    ) -> None:
        assert compute_dtype is None or self.mixed_precision
        self.degrees = degrees or Degrees()
        self.compute_dtype = compute_dtype

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, and what to do: a clause behind its name; None: it can."""
        return None

    def data_parallel_degree(self, world_size: int) -> int:
        """Returns how many ranks see different data; the others repeat it."""
        return world_size

    def data_rank(self, rank: int, world_size: int) -> int:
        """Returns which of the data parallel ranks ``rank`` is."""
        return rank % self.data_parallel_degree(world_size)

    @property
    def init_on_dtensors(self) -> bool:
        """Whether weights of ``--init sharded`` are DTensors when they are drawn."""
        return self.accepts_deferred_init or self.accepts_meta_model

    def dropout_on_dtensors(self, shape: ModelShape) -> bool:
        """Returns whether the dropout of a model's layers has DTensors as inputs."""
        del shape
        return False

    def check(self, world_size: int, shape: ModelShape) -> None:  # noqa: B027
        """Refuses a world size or a model that the system cannot run, before anything starts.

        Raises:
            UsageError: naming the size that does not fit.
        """

    @abstractmethod
    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Returns ``model``, of ``shape``, ready for training on the default process group.

        Every rank passes the same weights.
        """

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Returns what steps a model of ``parallelize``; ``optimizer`` is of its parameters."""
        del model
        return optimizer

    def autocast(self, model: nn.Module) -> None:
        """Have ``forward`` run under autocast in the compute dtype, if there is one."""
        if self.compute_dtype is not None:
            model.forward = torch.autocast("cpu", self.compute_dtype)(model.forward)

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Returns the context of one microbatch; gradients are reduced in the ``last`` one."""
        del model, last
        return nullcontext()

    def forward_backward(self, model: nn.Module, batch: Batch, *, parts: int, last: bool) -> Tensor:
        """Leaves the gradients of one of ``parts`` microbatches of a step.

        Returns:
            its loss, divided by ``parts``, without a graph.
        """
        with self.microbatch(model, last=last):
            loss = loss_of(model(**batch)) / parts
            loss.backward()
        return loss.detach()

    def clip(self, model: nn.Module, most: float) -> Tensor:
        """Scales gradients down to the norm ``most`` where theirs is larger; returns theirs."""
        return clip_gradients(model.parameters(), most)


def require_divisible(shape: ModelShape, field: str, degree: int) -> None:
    """Refuses a ``degree`` that does not divide ``shape.field``.

    Raises:
        UsageError: naming the field, its value and the degree.
    """
    size = getattr(shape, field)
    if size % degree:
        raise UsageError(
            f"{degree} ranks do not divide {field} = {size}; use a number of ranks that does"
        )


def require_vocabulary(shape: ModelShape, degrees: Degrees) -> None:
    """Refuses to cut logits of a model that has none.

    Raises:
        UsageError: naming the option and the family.
    """
    if degrees.loss_parallel and shape.modality is not Modality.TEXT:
        raise UsageError(
            f"--loss-parallel cuts logits along the vocabulary, and a {shape.family} has none;"
            " leave it out"
        )
