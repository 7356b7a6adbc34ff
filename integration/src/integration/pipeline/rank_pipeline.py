"""The stages of one rank, what torch runs them with, and the loss that comes of it."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from integration.models import ModelShape
from integration.pipeline.families import family_of
from integration.pipeline.layout import PipelineLayout
from integration.pipeline.model_part import model_part
from integration.pipeline.stage_parallelism import STAGE_SYSTEMS, StageContext
from integration.systems.base import System


class RankPipeline:
    """The stages of one rank and what runs them.

    Args:
        layout: of the model.
        inner: what goes on within a stage.
        model: the whole one, the same on all ranks; it is not needed afterwards.
        shape: of the model.
        mesh: pipeline first, then the ranks of a stage.
        make_stage: torch's PipelineStage, or a subclass.

    Attributes:
        model: this rank's part of the whole one, under its names; never called itself, it holds
            the parameters of all stages of the rank for the optimizer and for checkpoints.
        stages: of this rank, in the order of the model.
        group: the ranks of this rank's pipeline.
    """

    def __init__(
        self,
        layout: PipelineLayout,
        inner: System,
        model: nn.Module,
        shape: ModelShape,
        mesh: DeviceMesh,
        make_stage: type[PipelineStage] = PipelineStage,
    ) -> None:
        self._family = family_of(model)
        self.group = mesh.get_group("pp")
        count = len(layout.stages)
        indices = layout.stages_of(mesh.get_local_rank("pp"))
        units = [unit for stage in layout.stages for unit in stage]
        mine = [unit for index in indices for unit in layout.stages[index]]
        self.model = model_part(model, mine, set(units) - set(mine))
        self._planned: list[nn.Module] = []
        self.stages: list[PipelineStage] = []
        for index in indices:
            kept = layout.stages[index]
            part = model_part(model, kept, set(units) - set(kept))
            part.forward = self._family.forward_of(part)
            layers = [name for name in kept if name.rpartition(".")[2].isdigit()]
            inside = mesh[mesh.mesh_dim_names[1]]  # type: ignore[index]
            run = STAGE_SYSTEMS[inner.name](
                part, StageContext(inside, layers, shape, inner.degrees)
            )
            self._last_part = part
            if inner.name == "plan" and layers:
                self._planned.append(part)
            self.stages.append(make_stage(run, index, count, torch.device("cpu"), group=self.group))
        self._is_first, self._is_last = 0 in indices, count - 1 in indices
        self._microbatches = layout.microbatches
        self._share = 1.0
        self.schedule = layout.schedule.build(self.stages, layout.microbatches, self._loss)

    def forward_backward(self, batch: Mapping[str, Tensor], parts: int) -> Tensor:
        """Leave the gradients of one of ``parts`` microbatches of a step; return its loss."""
        self._share = 1.0 / (self._microbatches * parts)
        given = self._family.inputs(batch) if self._is_first else ()
        target = self._family.target(batch) if self._is_last else None
        losses: list[Tensor] = []
        with self._own_gradients():
            self.schedule.step(*given, target=target, losses=losses, return_outputs=False)
        if self._planned:
            _place_gradients(self.model)
        # Only the last stage has it; the sum gives it to all.
        loss = torch.zeros((), dtype=torch.float64)
        for each in losses:
            loss += each.detach()
        dist.all_reduce(loss, group=self.group)
        return loss

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._family.loss(self._last_part, output, target) * self._share

    def _own_gradients(self) -> ExitStack:
        """Keep a plan from reducing the gradients of each of the schedule's microbatches."""
        stack = ExitStack()
        if self._planned:
            from plan_api import installed

            for part in self._planned:
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
