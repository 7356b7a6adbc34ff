"""The system of a pipeline whose stages another system parallelizes."""

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
    """Pipeline parallelism between stages, and another system within each stage.

    Rank ``p * ranks + r`` is rank ``r`` of the ``ranks`` that share the stages of pipeline rank
    ``p``.

    Args:
        inner: system that parallelizes a stage.
        layout: stages of the model.
    """

    def __init__(self, inner: System, layout: PipelineLayout) -> None:
        super().__init__(inner.degrees)
        self.name = f"{inner.name}+pp"
        self.supports_all_optimizers = inner.supports_all_optimizers
        self.shards_batches = inner.shards_batches
        self._inner, self._layout = inner, layout
        self._running: RankPipeline | None = None

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Validates the inner system on the ranks of a stage."""
        ranks = world_size // self._layout.degree
        if self._inner.name == "plan":
            check_degrees(self.degrees, ranks)
        self._inner.check(ranks, shape)

    def dropout_on_dtensors(self, shape: ModelShape) -> bool:
        """Returns whether it has under the inner system; only plans compute on DTensors."""
        return self._inner.name == "plan" and self._inner.dropout_on_dtensors(shape)

    def data_parallel_degree(self, world_size: int) -> int:
        """Returns the data parallel degree within a stage."""
        return self._inner.data_parallel_degree(world_size // self._layout.degree)

    def parallelize(self, model: nn.Module, shape: ModelShape, world_size: int) -> nn.Module:
        """Returns this rank's part of the model; parameters have the full model's names."""
        axis = "tp" if self._inner.name in TENSOR_PARALLEL else "dp"
        mesh = init_device_mesh(
            "cpu",
            (self._layout.degree, world_size // self._layout.degree),
            mesh_dim_names=("pp", axis),
        )
        self._running = RankPipeline(self._layout, self._inner, model, shape, mesh)
        return self._running.model

    def forward_backward(self, model: nn.Module, batch: Batch, *, parts: int, last: bool) -> Tensor:
        """Runs the schedule on a microbatch; returns its loss on all ranks of the pipeline."""
        del model, last
        assert self._running is not None
        return self._running.forward_backward(batch, parts)

    def clip(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clips gradients by their total norm over all stages."""
        assert self._running is not None
        return clip_gradients(model.parameters(), max_norm, group=self._running.group)
