"""The interface of systems, with which the trainer parallelizes and runs a model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from integration.data import Batch, Modality
from integration.device import CPU, Device
from integration.errors import UsageError
from integration.models import ModelShape, loss_of
from integration.systems.clip import clip_gradients
from integration.systems.degrees import Degrees

# Dtypes in which the operators of autocast can compute.
AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)
Recompute = Literal["none", "full", "selective-op", "selective-layer", "keep-dispatch"]
Backend = Literal["none", "aot_eager", "inductor"]
Precision = Literal["none", "float8-tensorwise", "float8-rowwise", "float8-block", "mxfp8"]


@dataclass(frozen=True)
class LayerPolicies:
    """How the repeated layers of a model run.

    Attributes:
        recompute: which activations are computed again in backward.
        every: with ``selective-layer``, the distance of the layers that are recomputed.
        compile: backend that compiles each layer.
        precision: recipe of the linear layers, or none.
        precision_exclude: pattern of the names of linear layers without the recipe.
    """

    recompute: Recompute = "none"
    every: int = 1
    compile: Backend = "none"
    precision: Precision = "none"
    precision_exclude: str = ""

    @property
    def low_precision_path(self) -> str:
        """Pattern of the names of modules, of which linear layers have the recipe."""
        return rf"(?!(?:{self.precision_exclude})$).*"


class System(ABC):
    """An implementation of distributed training.

    Attributes:
        name: its name on the command line.
        degrees: degrees of its mesh axes, for systems that compose several kinds of parallelism.
        compute_dtype: dtype of compute in mixed precision; None: the dtype of the weights.
        device: that models and meshes are on.
        layer_policies: how layers run, for systems whose plans say so.
        has_documents: whether batches have the positions of tokens in their documents, to which
            attention is limited.
    """

    name: str
    # Whether parallelize() takes a model on the meta device, whose weights are drawn afterwards.
    accepts_meta_model: bool = False
    # Whether weights drawn on its shards need dist-rng to be those of one device.
    needs_dist_rng_for_init: bool = False
    # Whether it takes a model from plan_api.deferred_init and draws the weights itself.
    accepts_deferred_init: bool = False
    # Whether it composes several kinds of parallelism by degrees.
    accepts_degrees: bool = False
    # Whether it takes fsdp's placements of parameters, gradients and optimizer state.
    accepts_placements: bool = False
    # Whether attention can be limited to the documents of packed sequences.
    supports_documents: bool = False
    # Whether it can keep sharded parameters, gradients and optimizer state on the host.
    accepts_offload: bool = False
    # Whether it can send the terms of gradients in a narrower dtype than they are added in.
    accepts_send_dtype: bool = False
    # Whether it supports block-wise and matrix optimizers, which need parameters with their
    # original shapes, unsharded or as DTensors.
    supports_all_optimizers: bool = False
    # Whether parameters are in fsdp's buffers: AdamW and clipping are fsdp's, which take those of a
    # buffer together; AdamW has torch's bits.
    on_buffers: bool = False
    # Whether each layer can be compiled as one graph.
    supports_compile: bool = False
    # Whether its linear layers can quantize the operands of their products.
    supports_precision: bool = False
    # Whether its plan says which layers are recomputed and compiled, instead of the trainer.
    plans_layers: bool = False
    # Dtypes of compute that it supports in mixed precision.
    compute_dtypes: tuple[torch.dtype, ...] = ()
    # Whether its tensor parallel degree has to divide the sequence length.
    needs_even_sequences: bool = False
    # Whether it shards batches itself: every rank passes the samples of all data parallel ranks.
    shards_batches: bool = False
    # Whether it uses no package of this repository.
    native: bool = True
    # Whether the trainer can save, load and clip its weights and gradients.
    supports_checkpoints: bool = True
    # Families of models that it supports; None: all.
    families: tuple[str, ...] | None = None

    def __init__(
        self,
        degrees: Degrees | None = None,
        compute_dtype: torch.dtype | None = None,
        device: Device = CPU,
    ) -> None:
        assert compute_dtype is None or compute_dtype in self.compute_dtypes
        self.degrees = degrees or Degrees()
        self.compute_dtype = compute_dtype
        self.device = device
        self.layer_policies = LayerPolicies()
        self.has_documents = False

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, and the remedy, as a clause after its name; None: it can."""
        return None

    def data_parallel_degree(self, world_size: int) -> int:
        """Returns the data parallel degree: the number of ranks with different data."""
        return world_size

    def data_rank(self, rank: int, world_size: int) -> int:
        """Returns the data parallel rank of ``rank``."""
        return rank % self.data_parallel_degree(world_size)

    @property
    def init_on_dtensors(self) -> bool:
        """Whether ``--init sharded`` draws DTensors."""
        return self.accepts_deferred_init or self.accepts_meta_model

    def dist_rng_draws_dropout(self, shape: ModelShape) -> bool:
        """Returns whether dist-rng draws the masks of dropout in a model's layers."""
        del shape
        return False

    def check(self, world_size: int, shape: ModelShape) -> None:  # noqa: B027
        """Refuses a world size or a model that the system does not support.

        Raises:
            UsageError: names the size that does not fit.
        """

    @abstractmethod
    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Parallelizes ``model``, of ``shape``, on the default process group, and returns it.

        Every rank passes the same weights, on its device.
        """

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> Optimizer:
        """Returns the optimizer of a parallelized model, which may wrap ``optimizer``."""
        del model
        return optimizer

    def autocast(self, model: nn.Module) -> None:
        """Makes ``forward`` run under autocast in the compute dtype, if there is one."""
        if self.compute_dtype is None:
            return
        forward: Any = model.forward
        cast = torch.autocast(self.device.type, self.compute_dtype)(forward.__func__)
        # A method, so that a copy of the model does not call the original.
        model.forward = MethodType(cast, model)

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Returns the context of one microbatch; gradients are reduced in the ``last`` only."""
        del model, last
        return nullcontext()

    @property
    def inputs_on_host(self) -> tuple[str, ...]:
        """Names of the tensors of a batch that stay on the host."""
        return ()

    def inputs(self, batch: Batch) -> AbstractContextManager[Batch]:
        """Returns the context of forward and backward, whose value is what the model takes.

        transformers' models make the mask of documents from positions that restart.
        """
        return nullcontext(batch)

    def forward_backward(
        self, model: nn.Module, batch: Batch, *, parts: int, last: bool, scale: float = 1.0
    ) -> Tensor:
        """Accumulates the gradients of one of ``parts`` microbatches of a step.

        Args:
            model: of `parallelize`.
            batch: one microbatch.
            parts: microbatches of a step.
            last: whether it is the last one of the step.
            scale: factor of the gradients, against underflow.

        Returns:
            The loss divided by ``parts``, detached, without ``scale``.
        """
        with self.microbatch(model, last=last), self.inputs(batch) as inputs:
            loss = loss_of(model(**inputs)) / parts
            (loss * scale).backward()
        return loss.detach()

    def evaluated_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the modules that ``evaluate`` calls."""
        return [model]

    def evaluate(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the loss of a microbatch, where gradients are disabled."""
        with self.microbatch(model, last=True), self.inputs(batch) as inputs:
            return loss_of(model(**inputs))

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clips gradients to the total norm ``max_norm``; returns the norm before."""
        return clip_gradients(model.parameters(), max_norm, on_buffers=self.on_buffers)


def require_divisible(shape: ModelShape, field: str, degree: int) -> None:
    """Refuses a ``degree`` that does not divide ``shape.field``.

    Raises:
        UsageError: names the field, its value and the degree.
    """
    size = getattr(shape, field)
    if size % degree:
        raise UsageError(
            f"{degree} ranks do not divide {field} = {size}; use a number of ranks that does"
        )


def require_vocabulary(shape: ModelShape, degrees: Degrees) -> None:
    """Refuses ``--loss-parallel`` for a model without logits.

    Raises:
        UsageError: names the option and the family.
    """
    if degrees.loss_parallel and shape.modality is not Modality.TEXT:
        raise UsageError(
            f"--loss-parallel: expected a model with logits, which are sharded along the"
            f" vocabulary, got a {shape.family}; leave it out"
        )
