"""A pipeline around a system: stages on groups of ranks, each of which the system shares out."""

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from integration.data import Batch
from integration.models import ModelShape
from integration.pipeline.layout import PipelineLayout
from integration.pipeline.rank_pipeline import RankPipeline
from integration.pipeline.stage_parallelism import TENSOR_PARALLEL, check_degrees
from integration.systems.base import System
from integration.systems.clip import clip_gradients


class PipelineSystem(System):
    """Pipeline parallelism between stages, another system within each.

    Rank ``p * ranks + r`` is number ``r`` of the ``ranks`` that share the stages of place ``p``.

    Args:
        inner: what goes on within a stage.
        layout: of the model that will be trained.
    """

    def __init__(self, inner: System, layout: PipelineLayout) -> None:
        super().__init__(inner.degrees)
        self.name = f"{inner.name}+pp"
        self.supports_all_optimizers = inner.supports_all_optimizers
        self.shards_batches = inner.shards_batches
        self._inner, self._layout = inner, layout
        self._running: RankPipeline | None = None

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuse what the system within a stage refuses on the stage's ranks."""
        ranks = world_size // self._layout.degree
        if self._inner.name == "plan":
            check_degrees(self.degrees, ranks)
        self._inner.check(ranks, shape)

    def dropout_on_dtensors(self, shape: ModelShape) -> bool:
        """Return whether it has within a stage; `parallelize_module` has attention on parts."""
        return self._inner.name == "plan" and self._inner.dropout_on_dtensors(shape)

    def data_parallel_degree(self, world_size: int) -> int:
        """Return how many of a stage's ranks see different data."""
        return self._inner.data_parallel_degree(world_size // self._layout.degree)

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Return this rank's part of the model, whose parameters have the whole model's names."""
        axis = "tp" if self._inner.name in TENSOR_PARALLEL else "dp"
        mesh = init_device_mesh(
            "cpu",
            (self._layout.degree, world_size // self._layout.degree),
            mesh_dim_names=("pp", axis),
        )
        self._running = RankPipeline(self._layout, self._inner, model, shape, mesh)
        return self._running.model

    def forward_backward(self, model: nn.Module, batch: Batch, *, parts: int, last: bool) -> Tensor:
        """Run the schedule on a microbatch; return its loss, which all ranks of a pipeline get."""
        del model, last
        assert self._running is not None
        return self._running.forward_backward(batch, parts)

    def clip(self, model: nn.Module, most: float) -> Tensor:
        """Scale gradients by the norm of those of all stages."""
        assert self._running is not None
        return clip_gradients(model.parameters(), most, group=self._running.group)
