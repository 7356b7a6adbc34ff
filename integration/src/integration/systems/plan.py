"""plan-api: the unmodified model, parallelized by a plan of the zoo, with all installed packages.

It is imported on use, as the other systems need only torch.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from integration.data import POSITIONS, Batch
from integration.errors import UsageError
from integration.models import DecoderShape, DiTShape, ExpertsShape, ModelShape
from integration.systems.base import AUTOCAST_DTYPES, System, require_vocabulary
from integration.systems.degrees import Degrees
from integration.systems.divisors import alternatives, divisors, require_divisors

# Families of models that the zoo has plans of.
ZOO = ("llama", "qwen3", "gemma3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "dit")


class PlanSystem(System):
    """A plan of the zoo with given degrees; every rank passes the microbatches of all ranks.

    In float64 losses are within 2e-15 of the single device's (llama-tiny, 30 steps).
    """

    name = "plan"
    native = False
    accepts_degrees = True
    accepts_placements = True
    accepts_offload = True
    accepts_send_dtype = True
    accepts_deferred_init = True
    supports_documents = True
    shards_batches = True
    supports_all_optimizers = True
    on_buffers = True
    supports_compile = True
    supports_precision = True
    plans_layers = True
    compute_dtypes = AUTOCAST_DTYPES

    # Makes the plan from mesh, shape and degrees; None: the zoo does.
    make_plan: Callable[..., Any] | None = None

    def data_parallel_degree(self, world_size: int) -> int:
        """Returns the data parallel degree; the plan shards the batch that each rank passes."""
        del world_size
        return self.degrees.data

    def dist_rng_draws_dropout(self, shape: ModelShape) -> bool:
        """Returns True: layers compute on DTensors, or static mode draws as if on them."""
        del shape
        return True

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuses degrees whose product is not the world size, or that do not divide the model."""
        degrees = self.degrees
        degrees.check(world_size)
        if self.make_plan is not None:
            return  # which knows its model
        _require_zoo(shape)
        require_vocabulary(shape, degrees)
        if degrees.ep > 1:
            if not isinstance(shape, ExpertsShape):
                raise UsageError(
                    f"--ep: expected a model with experts, got a {shape.family}; leave it out"
                )
            require_divisors(shape, ("num_local_experts",), "--ep", degrees.ep, degrees.fitting_ep)
        if degrees.cp > 1 or self.has_documents:
            _check_context(shape, degrees)
        # Static mode divides heads unevenly, too. Phases (ZeRO-3) do not, nor plans of DeepSeek-V3,
        # whose kv_b_proj has the keys and the values of a head, which are of different sizes.
        divides_unevenly = degrees.static and not degrees.zero3 and shape.family != "deepseek_v3"
        if not divides_unevenly:
            fields = shape.tensor_parallel_sizes
            require_divisors(shape, fields, "--tp", degrees.tp, degrees.fitting("tp"))

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Applies the plan, including fully_shard for ``dp_shard``."""
        del world_size
        from integration.systems.zoo import add_layer_policies, plan_of, precision_error
        from plan_api import Plan, parallelize

        self.autocast(model)
        axes = self.degrees.axes
        if self.has_documents:  # of which attention knows where a plan has an axis of sequences
            axes = self.degrees.axes_with("cp")
        if "cp" in axes and self.make_plan is None:
            describe_masks_of(model)
        mesh = init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        if self.make_plan is None:
            plan = plan_of(
                shape, mesh, self.degrees, gathered=self.compute_dtype,
                balanced=self.has_documents, precision=self.layer_policies.precision,
            )  # fmt: skip
        else:
            plan = self.make_plan(mesh, shape, self.degrees)
        if not isinstance(plan, Plan):
            raise UsageError(
                "--plan: expected the function to return a plan_api.Plan, got a"
                f" {type(plan).__name__}; return one"
            )
        add_layer_policies(plan, self.layer_policies, shape, len(shape.layers_of(model)))
        mode: Literal["static", "eager"] = "static" if self.degrees.static else "eager"
        try:
            return parallelize(model, plan, mode=mode, overlap=self.degrees.overlap)
        except ValueError as error:
            if str(error).startswith("overlap="):
                raise UsageError(f"--{error}") from error
            if (usage_error := precision_error(self.layer_policies, error)) is not None:
                raise usage_error from error
            if self.make_plan is None:
                raise
            raise UsageError(f"--plan: {error}; correct it") from error

    @property
    def inputs_on_host(self) -> tuple[str, ...]:
        """Positions, of which the mask of attention is made."""
        return (POSITIONS,)

    @contextmanager
    def inputs(self, batch: Batch) -> Iterator[Batch]:
        """Describes the mask of documents, instead of positions that restart.

        The model's own positions count the tokens of a sequence. Rotary embeddings make of them
        what they make of positions that restart, as scores depend on differences.
        """
        if not self.has_documents:
            yield batch
            return
        from plan_api import AttentionMask, attention_mask

        rows = batch[POSITIONS].chunk(self.degrees.data)
        own = dist.get_rank() // (self.degrees.cp * self.degrees.tp)
        with attention_mask(AttentionMask.of_position_ids(rows[own])):
            yield {name: tensor for name, tensor in batch.items() if name != POSITIONS}

    def microbatch(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Reduces gradients in the last microbatch only."""
        from plan_api import installed

        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        return nullcontext() if last else installed(model).gradients.no_sync()


def _require_zoo(shape: ModelShape) -> None:
    """Refuses a model for which the zoo has no plan.

    Raises:
        UsageError: names the model's family.
    """
    if shape.family not in ZOO:
        raise UsageError(
            f"--system plan: expected a model of {', '.join(ZOO)}, of which the zoo has plans, got"
            f" a {shape.family}; give --plan package.module:function, or another --system"
        )


def _check_context(shape: ModelShape, degrees: Degrees) -> None:
    """Refuses degrees with which attention cannot be over a sharded sequence.

    Raises:
        UsageError: names a degree and those that would fit.
    """
    if isinstance(shape, DiTShape):
        if degrees.sp:
            raise UsageError(
                f"--cp {degrees.cp}: expected no --sp for a dit, of whose last layer DTensor does"
                " not view patches that both shard, got --sp; leave either out"
            )
        require_divisors(shape, ("patches",), "--cp", degrees.cp, degrees.fitting("cp"))
    if degrees.ulysses_degree > 1:
        field = "num_key_value_heads" if isinstance(shape, DecoderShape) else "num_heads"
        _require_heads(field, getattr(shape, field), degrees)


def _require_heads(field: str, heads: int, degrees: Degrees) -> None:
    """Refuses ranks to which Ulysses cannot give a whole number of heads.

    Raises:
        UsageError: names the number of heads, and its divisors.
    """
    ranks = degrees.ulysses_degree * degrees.tp
    if heads % ranks:
        sharing = f"--cp {degrees.cp}" if degrees.cp_method == "ulysses" else degrees.ulysses_degree
        raise UsageError(
            f"--cp-method {degrees.cp_method}: expected {sharing} x --tp {degrees.tp} to divide"
            f" {field} = {heads}, got {ranks}; give degrees whose product is"
            f" {alternatives(divisors(heads))}, or --cp-method ring"
        )


def describe_masks_of(model: nn.Module) -> None:
    """Makes a model of transformers describe its masks to attention over sharded sequences."""
    from plan_api import describe_masks

    if hasattr(model, "set_attn_implementation"):
        describe_masks(model)
