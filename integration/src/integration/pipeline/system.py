"""A pipeline around a system: stages on groups of ranks, each of which the system shares out."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from integration.models import ModelShape
from integration.pipeline.families import Family, family_of
from integration.pipeline.layout import PipelineLayout
from integration.pipeline.part import part_of
from integration.pipeline.partners import PARTNERS, TENSOR_PARALLEL, Within, check_degrees
from integration.systems.base import System
from integration.systems.clip import clip_gradients


class Pipelined(System):
    """Pipeline parallelism between stages, another system within each.

    Rank ``p * ranks + r`` is number ``r`` of the ``ranks`` that share the stages of place ``p``.

    Args:
        inner: what goes on within a stage.
        layout: of the model that will be trained.
    """

    def __init__(self, inner: System, layout: PipelineLayout) -> None:
        super().__init__(inner.degrees)
        self.name = f"{inner.name}+pp"
        self.tolerance = inner.tolerance
        self.any_optimizer = inner.any_optimizer
        self._inner, self._layout = inner, layout
        self._running: _RankPipeline | None = None

    def check(self, world_size: int, shape: ModelShape) -> None:
        """Refuse what the system within a stage refuses on the stage's ranks."""
        ranks = world_size // self._layout.degree
        if self._inner.name == "plan":
            check_degrees(self.degrees, ranks)
        self._inner.check(ranks, shape)

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
        self._running = _RankPipeline(self._layout, self._inner, model, shape, mesh)
        return self._running.model

    def forward_backward(
        self, model: nn.Module, batch: Mapping[str, Tensor], *, parts: int, last: bool
    ) -> Tensor:
        """Run the schedule on a microbatch; return its loss, which all ranks of a pipeline get."""
        del model, last
        assert self._running is not None
        return self._running.forward_backward(batch, parts)

    def clip(self, model: nn.Module, most: float) -> Tensor:
        """Scale gradients by the norm of those of all stages."""
        assert self._running is not None
        return clip_gradients(model.parameters(), most, group=self._running.group)


class _RankPipeline:
    """The stages of one rank and what runs them.

    Args:
        layout: of the model.
        inner: what goes on within a stage.
        model: the whole one, the same on all ranks; it is not needed afterwards.
        shape: of the model.
        mesh: pipeline first, then the ranks of a stage.
    """

    def __init__(
        self,
        layout: PipelineLayout,
        inner: System,
        model: nn.Module,
        shape: ModelShape,
        mesh: DeviceMesh,
    ) -> None:
        self._family: Family = family_of(model)
        self.group = mesh.get_group("pp")
        count = len(layout.stages)
        indices = layout.stages_of(mesh.get_local_rank("pp"))
        units = [unit for stage in layout.stages for unit in stage]
        mine = [unit for index in indices for unit in layout.stages[index]]
        # Never called: it has the parameters of all stages here, for optimizer and checkpoints.
        self.model = part_of(model, mine, set(units) - set(mine))
        self._parts: list[nn.Module] = []
        stages: list[PipelineStage] = []
        for index in indices:
            kept = layout.stages[index]
            part = part_of(model, kept, set(units) - set(kept))
            part.forward = self._family.forward_of(part)
            layers = [name for name in kept if name.rpartition(".")[2].isdigit()]
            inside = mesh[mesh.mesh_dim_names[1]]  # type: ignore[index]
            run = PARTNERS[inner.name](part, Within(inside, layers, shape, inner.degrees))
            self._parts.append(part)
            stages.append(PipelineStage(run, index, count, torch.device("cpu"), group=self.group))
        self._is_first, self._is_last = 0 in indices, count - 1 in indices
        self._last_part = self._parts[-1]
        self._microbatches = layout.microbatches
        self._share = 1.0
        self._places_gradients = inner.name == "plan"
        self.schedule = layout.schedule.build(stages, layout.microbatches, self._loss)

    def forward_backward(self, batch: Mapping[str, Tensor], parts: int) -> Tensor:
        """Leave the gradients of one of ``parts`` microbatches of a step; return its loss."""
        self._share = 1.0 / (self._microbatches * parts)
        given = self._family.inputs(batch) if self._is_first else ()
        target = self._family.target(batch) if self._is_last else None
        losses: list[Tensor] = []
        with self._own_gradients():
            self.schedule.step(*given, target=target, losses=losses, return_outputs=False)
        if self._places_gradients:
            _place_gradients(self.model)
        # Only the last stage has it; the sum gives it to all.
        loss = torch.zeros((), dtype=torch.float64)
        for each in losses:
            loss += each.detach()
        dist.all_reduce(loss, group=self.group)
        return loss

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._family.loss(self._last_part, output, target) * self._share

    def _own_gradients(self) -> AbstractContextManager[object]:
        """Keep a plan from reducing the gradients of each of the schedule's microbatches."""
        if not self._places_gradients:
            return nullcontext()
        from contextlib import ExitStack

        from plan_api import installed

        stack = ExitStack()
        for part in self._parts:
            stack.enter_context(installed(part).gradients.no_sync())
        return stack


def _place_gradients(model: nn.Module) -> None:
    """Place gradients as their parameters, in few collectives."""
    from fused_comm import redistribute_many

    wrong: list[Any] = [
        parameter
        for parameter in model.parameters()
        if isinstance(parameter.grad, DTensor)
        and isinstance(parameter, DTensor)
        and parameter.grad.placements != parameter.placements
    ]
    if wrong:
        placed = redistribute_many(
            [parameter.grad for parameter in wrong], [parameter.placements for parameter in wrong]
        )
        for parameter, gradient in zip(wrong, placed, strict=True):
            parameter.grad = gradient
