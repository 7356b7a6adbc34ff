"""The layout of a pipeline, and the stages, schedule and loss of one of its ranks."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from integration.models import ModelShape
from integration.pipeline.families import family_of
from integration.pipeline.schedules import PipelineSchedule
from integration.pipeline.split import (
    check_split,
    even_split,
    model_part,
    require_untied,
    stage_units,
)
from integration.pipeline.stage_parallelism import STAGE_SYSTEMS, StageContext
from integration.systems.base import System


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a pipeline.

    Attributes:
        degree: pipeline parallel degree.
        split_points: first module of each stage but the first; None: even stages.
        schedule: order of forwards and backwards.
        microbatches: microbatches of the schedule per microbatch of the trainer.
    """

    degree: int
    split_points: tuple[str, ...] | None
    schedule: PipelineSchedule
    microbatches: int


@dataclass(frozen=True)
class PipelineLayout:
    """Validated options of a pipeline.

    Attributes:
        stages: the units of each stage.
    """

    degree: int
    microbatches: int
    schedule: PipelineSchedule
    stages: tuple[tuple[str, ...], ...]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the indices of the stages of a rank of the pipeline."""
        return self.schedule.stages_of(rank, self.degree, len(self.stages))


def make_layout(options: PipelineOptions, model: nn.Module) -> PipelineLayout:
    """Splits a model, which may be on the meta device, into stages.

    Raises:
        UsageError: the schedule does not support the number of stages or microbatches, or the
            model cannot be split at the split points.
    """
    schedule = options.schedule
    stages = schedule.stages(options.degree, options.split_points)
    schedule.check_microbatches(options.microbatches, options.degree, stages)
    chain = family_of(model).chain(model)
    require_untied(model, chain)
    points: Sequence[str]
    if options.split_points is None:
        points = even_split(chain, stages)
    else:
        points = options.split_points
        check_split(chain, points)
    return PipelineLayout(
        options.degree, options.microbatches, schedule, stage_units(chain, points)
    )


class RankPipeline:
    """The pipeline stages of one rank.

    Args:
        layout: stages of the model.
        inner: system that parallelizes a stage.
        model: the full model, the same on all ranks; not used after construction.
        shape: shape of the model.
        mesh: mesh of the pipeline axis and the axis of a stage's ranks.
        make_stage: torch's PipelineStage, or a subclass.

    Attributes:
        model: this rank's part of the full model, with the same parameter names. It is not called;
            it contains the parameters of the rank's stages for the optimizer and checkpoints.
        stages: stages of this rank, in the order of the model.
        group: process group of this rank's pipeline.
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
        own = [unit for index in indices for unit in layout.stages[index]]
        self.model = model_part(model, own, set(units) - set(own))
        self._plan_parts: list[nn.Module] = []
        self.stages: list[PipelineStage] = []
        for index in indices:
            present = layout.stages[index]
            part = model_part(model, present, set(units) - set(present))
            part.forward = self._family.forward_of(part)
            layers = [name for name in present if name.rpartition(".")[2].isdigit()]
            stage_mesh = mesh[mesh.mesh_dim_names[1]]  # type: ignore[index]
            stage = STAGE_SYSTEMS[inner.name](
                part, StageContext(stage_mesh, layers, shape, inner.degrees)
            )
            self._last_part = part
            if inner.name == "plan" and layers:
                self._plan_parts.append(part)
            self.stages.append(
                make_stage(stage, index, count, inner.device.current, group=self.group)
            )
        self._is_first, self._is_last = 0 in indices, count - 1 in indices
        self._microbatches, self._device = layout.microbatches, inner.device.current
        self._share = 1.0
        self.schedule = layout.schedule.build(self.stages, layout.microbatches, self._loss)

    def forward_backward(self, batch: Mapping[str, Tensor], parts: int) -> Tensor:
        """Accumulates the gradients of one of ``parts`` microbatches; returns its loss."""
        self._share = 1.0 / (self._microbatches * parts)
        inputs = self._family.inputs(batch) if self._is_first else ()
        target = self._family.target(batch) if self._is_last else None
        losses: list[Tensor] = []
        with self._unreduced_gradients():
            self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        if self._plan_parts:
            _place_gradients(self.model)
        # Only the last stage has losses; the sum sends them to all.
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for each in losses:
            loss += each.detach()
        dist.all_reduce(loss, group=self.group)
        return loss

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._family.loss(self._last_part, output, target) * self._share

    def _unreduced_gradients(self) -> ExitStack:
        """Disables a plan's gradient reduction for the microbatches of the schedule."""
        stack = ExitStack()
        if self._plan_parts:
            from plan_api import installed

            for part in self._plan_parts:
                stack.enter_context(installed(part).gradients.no_sync())
        return stack


def _place_gradients(model: nn.Module) -> None:
    """Redistributes gradients to the placements of their parameters, in few collectives."""
    from fused_comm import redistribute_many

    misplaced: list[Any] = [
        parameter
        for parameter in model.parameters()
        if isinstance(parameter.grad, DTensor)
        and isinstance(parameter, DTensor)
        and parameter.grad.placements != parameter.placements
    ]
    if misplaced:
        placed = redistribute_many(
            [parameter.grad for parameter in misplaced],
            [parameter.placements for parameter in misplaced],
        )
        for parameter, gradient in zip(misplaced, placed, strict=True):
            parameter.grad = gradient
