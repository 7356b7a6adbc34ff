"""The system of a pipeline whose stages another system parallelizes, made from a run's options."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from integration.data import Batch
from integration.errors import UsageError
from integration.models import ModelShape, RouterOptions, build_model_on_meta
from integration.pipeline.rank_pipeline import (
    PipelineLayout,
    PipelineOptions,
    RankPipeline,
    make_layout,
)
from integration.pipeline.schedules import get_schedule
from integration.pipeline.stage_parallelism import (
    STAGE_SYSTEMS,
    TENSOR_PARALLEL,
)
from integration.systems.base import System
from integration.systems.clip import clip_gradients
from integration.systems.plan import describe_masks_of
from integration.train.config import DIST_RNG_RANDOM, TrainConfig, router_options_of


class PipelineSystem(System):
    """Pipeline parallelism between stages, and another system within each stage.

    Rank ``p * ranks + r`` is rank ``r`` of the ``ranks`` that share the stages of pipeline rank
    ``p``.

    Args:
        inner: system that parallelizes a stage.
        layout: stages of the model.
        one_device_random: whether dropout draws one device's masks, by dist-rng.
        router_options: what the run adds to routers.
    """

    def __init__(
        self,
        inner: System,
        layout: PipelineLayout,
        *,
        one_device_random: bool,
        router_options: RouterOptions,
    ) -> None:
        self.compute_dtypes = inner.compute_dtypes
        super().__init__(inner.degrees, inner.compute_dtype, inner.device)
        self.name = f"{inner.name}+pp"
        self.supports_all_optimizers = inner.supports_all_optimizers
        self.on_buffers = inner.on_buffers
        self.shards_batches = inner.shards_batches
        self.accepts_deferred_init = inner.accepts_deferred_init
        self.plans_layers = inner.plans_layers
        self.has_documents = inner.has_documents
        self.layer_policies = inner.layer_policies
        self._inner, self._layout = inner, layout
        self._one_device_random, self._router_options = one_device_random, router_options
        self._running: RankPipeline | None = None

    @property
    def inputs_on_host(self) -> tuple[str, ...]:
        """Those of the inner system, whose masks are of the microbatches."""
        return self._inner.inputs_on_host

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Validates the inner system on the ranks of a stage."""
        ranks = world_size // self._layout.degree
        self._inner.check(ranks, shape)

    def dist_rng_draws_dropout(self, shape: ModelShape) -> bool:
        """Returns whether all ranks of a stage draw for the same samples, as one device does."""
        if self._inner.name == "plan":
            return self._inner.dist_rng_draws_dropout(shape)
        return self._inner.name == "single"

    def data_parallel_degree(self, world_size: int) -> int:
        """Returns the data parallel degree within a stage."""
        return self._inner.data_parallel_degree(world_size // self._layout.degree)

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Returns this rank's part of the model; parameters have the full model's names."""
        axes = self.degrees.axes
        if self._inner.name == "plan" and self._inner.has_documents:
            axes = self.degrees.axes_with("cp")
        if "cp" in axes:
            describe_masks_of(model)
        if self._inner.name != "plan":
            axis = "tp" if self._inner.name in TENSOR_PARALLEL else "dp"
            axes = {axis: world_size // self._layout.degree}
        mesh = init_device_mesh(
            self.device.type,
            (self._layout.degree, *axes.values()),
            mesh_dim_names=("pp", *axes),
        )
        self._running = RankPipeline(
            self._layout, self._inner, model, shape, mesh,
            one_device_random=self._one_device_random, router_options=self._router_options,
        )  # fmt: skip
        return self._running.model

    def forward_backward(
        self, model: nn.Module, batch: Batch, *, parts: int, last: bool, scale: float = 1.0
    ) -> Tensor:
        """Runs the schedule on a microbatch; returns its loss on all ranks of the pipeline."""
        del model
        assert self._running is not None
        return self._running.forward_backward(batch, parts, last=last, scale=scale)

    def evaluated_modules(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns the parts of this rank's stages."""
        del model
        assert self._running is not None
        return self._running.parts

    def evaluate(self, model: nn.Module, batch: Batch) -> Tensor:
        """Runs the forwards of the schedule on a microbatch; returns its loss on all ranks."""
        del model
        assert self._running is not None
        return self._running.evaluate(batch)

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clips gradients by their total norm over all stages."""
        assert self._running is not None
        copies = [copy.parameter for copy in self._running.tied if not copy.is_first]
        group = self._running.group
        return clip_gradients(
            model.parameters(), max_norm, group, copies=copies, on_buffers=self.on_buffers
        )


def with_pipeline(system: System, shape: ModelShape, config: TrainConfig, world: int) -> System:
    """Returns the pipeline of ``config`` around ``system``, or ``system`` if there is none.

    The model is built on the meta device to find its split points.

    Raises:
        UsageError: the options are incompatible with each other, the model, the system or the
            number of ranks.
    """
    if config.pp_degree == 1:
        return system
    schedule = get_schedule(config.pp_schedule)
    if world % config.pp_degree:
        raise UsageError(
            f"--pp-degree: expected a divisor of the {world} ranks, got {config.pp_degree};"
            " give another, or another number of ranks"
        )
    _check_stage_system(system.name)
    microbatches = config.pp_microbatches or config.micro_batch
    if config.micro_batch % microbatches:
        raise UsageError(
            f"--pp-microbatches: expected a divisor of --micro-batch {config.micro_batch}, got"
            f" {microbatches}; give another, or another --micro-batch"
        )
    if config.fingerprint:
        raise UsageError(
            "--fingerprint: expected --pp-degree 1, as it needs all weights on every rank, got"
            f" --pp-degree {config.pp_degree}; leave it out, or use --pp-degree 1"
        )
    points = config.pp_split_points
    options = PipelineOptions(
        degree=config.pp_degree,
        split_points=None if points is None else tuple(map(str.strip, points.split(","))),
        schedule=schedule,
        microbatches=microbatches,
    )
    return PipelineSystem(
        system,
        make_layout(options, build_model_on_meta(shape, dropout=config.dropout)),
        one_device_random=config.random == DIST_RNG_RANDOM,
        router_options=router_options_of(config),
    )


def _check_stage_system(system: str) -> None:
    if system not in STAGE_SYSTEMS:
        raise UsageError(
            f"system {system!r} does not support --pp-degree;"
            f" use one of: {', '.join(STAGE_SYSTEMS)}"
        )
