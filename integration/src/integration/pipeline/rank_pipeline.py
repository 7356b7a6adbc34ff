"""The layout of a pipeline, and the stages, schedule and loss of one of its ranks."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from integration.data import POSITIONS
from integration.errors import UsageError
from integration.models import ModelShape, RouterOptions
from integration.pipeline.families import family_of
from integration.pipeline.schedules import PipelineSchedule
from integration.pipeline.split import (
    TiedParameter,
    adopt_tensors,
    check_split,
    even_split,
    model_part,
    stage_units,
    tied_parameters,
)
from integration.pipeline.stage import Stage
from integration.pipeline.stage_context import StageContext
from integration.pipeline.stage_parallelism import STAGE_SYSTEMS, check_stages
from integration.pipeline.stage_random import StageRandom
from integration.pipeline.tied import TiedCopy, add_gradients, name_as_first
from integration.pipeline.trial_run import trial_runs
from integration.systems.base import System

if TYPE_CHECKING:
    from plan_api import RouterZLoss

_NO_ROUTER_OPTIONS = RouterOptions()


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

    @property
    def last(self) -> int:
        """Index of the last stage."""
        return len(self.stages) - 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the indices of the stages of a rank of the pipeline."""
        return self.schedule.stages_of(rank, self.degree, len(self.stages))

    def stage_of(self, unit: str) -> int:
        """Returns the index of the stage that has a unit."""
        return next(index for index, units in enumerate(self.stages) if unit in units)

    def rank_of(self, stage: int) -> int:
        """Returns the rank of the pipeline that has a stage."""
        return next(rank for rank in range(self.degree) if stage in self.stages_of(rank))


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
    points: Sequence[str]
    if options.split_points is None:
        points = even_split(chain, stages)
    else:
        points = options.split_points
        check_split(chain, points)
    layout = PipelineLayout(
        options.degree, options.microbatches, schedule, stage_units(chain, points)
    )
    for tied in tied_parameters(model, chain):
        first, other = layout.stage_of(tied.unit), layout.stage_of(tied.other_unit)
        if first != other and layout.rank_of(first) == layout.rank_of(other):
            raise UsageError(
                f"--pp-schedule {schedule.name}: expected {tied.name}, which is tied to"
                f" {tied.other_name}, on stages of two ranks or on one stage, got stages"
                f" {first} and {other} of one rank; use --pp-schedule 1F1B, or another"
                " whose last stage is on the last rank"
            )
    return layout


class RankPipeline:
    """The pipeline stages of one rank.

    Args:
        layout: stages of the model.
        inner: system that parallelizes a stage.
        model: the full model, the same on all ranks; not used after construction.
        shape: shape of the model.
        mesh: mesh of the pipeline axis, "pp", and the axes of a stage's ranks.
        make_stage: `Stage`, or a subclass.
        one_device_random: whether stages draw one device's random numbers, by dist-rng; all ranks
            have equal generators then.
        router_options: what the run adds to routers.

    Attributes:
        model: this rank's part of the full model, with the same parameter names. It is not called;
            it contains the parameters of the rank's stages for the optimizer and checkpoints.
        stages: stages of this rank, in the order of the model; none before the first batch.
        group: process group of this rank's pipeline.
        tied: this rank's copies of parameters that stages on another rank have, too.
    """

    def __init__(
        self,
        layout: PipelineLayout,
        inner: System,
        model: nn.Module,
        shape: ModelShape,
        mesh: DeviceMesh,
        make_stage: type[Stage] = Stage,
        *,
        one_device_random: bool = False,
        router_options: RouterOptions = _NO_ROUTER_OPTIONS,
    ) -> None:
        self._family = family_of(model)
        self._layout, self._make_stage = layout, make_stage
        self._device, self._one_device_random = inner.device, one_device_random
        self._degrees, self._has_masks = inner.degrees, inner.name == "plan" and inner.has_documents
        self._random: StageRandom | None = None
        self.group = mesh.get_group("pp")
        chain = self._family.chain(model)
        indices = layout.stages_of(mesh.get_local_rank("pp"))
        axes = tuple(name for name in mesh.mesh_dim_names or () if name != "pp")
        ties = [
            tied
            for tied in tied_parameters(model, chain)
            if layout.stage_of(tied.unit) != layout.stage_of(tied.other_unit)
        ]
        apart = [unit for tied in ties for unit in (tied.unit, tied.other_unit)]
        parts: dict[int, nn.Module] = {}
        self._parts: dict[int, nn.Module] = {}  # parallelized
        self._z_losses: list[RouterZLoss] = []
        context = StageContext(
            mesh[axes],
            model,
            self._family,
            chain,
            layout.stages[indices[0]],
            apart,
            shape,
            inner.degrees,
            inner.layer_policies,
        )
        check_stages(inner.name, context)
        for index in indices:
            units = layout.stages[index]
            parts[index] = part = model_part(model, units, chain)
            self._family.set_forward(part, first=index == 0)
            inner.autocast(part)
            if (z_loss := router_options.install(part)) is not None:
                self._z_losses.append(z_loss)
            self._parts[index] = STAGE_SYSTEMS[inner.name](part, replace(context, units=units))
        self._plan_parts = list(self._parts.values()) if inner.name == "plan" else []
        own = [unit for index in indices for unit in layout.stages[index]]
        self.model = model_part(model, own, chain)
        adopt_tensors(self.model, parts.values())
        self.tied = [copy for tied in ties if (copy := self._copy_of(tied)) is not None]
        self.stages: list[Stage] = []
        self._schedule: Any = None
        self._shapes: dict[str, torch.Size] = {}
        self._share = 1.0

    def _copy_of(self, tied: TiedParameter) -> TiedCopy | None:
        """Returns this rank's copy of a parameter, with the first unit's name; None without one."""
        first, other = (self._layout.stage_of(unit) for unit in (tied.unit, tied.other_unit))
        if first in self._parts:
            peer = self._layout.rank_of(other)
            return TiedCopy(_parameter(self.model, tied.name), peer, is_first=True)
        if other not in self._parts:
            return None
        parameter = _parameter(self.model, tied.other_name)
        name_as_first(self.model, tied.name, parameter)
        return TiedCopy(parameter, self._layout.rank_of(first), is_first=False)

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        """Makes the stages and the schedule for batches of this shape; all ranks call it."""
        shapes = {name: tensor.shape for name, tensor in batch.items()}
        if shapes == self._shapes:
            return
        layout = self._layout
        micro = {name: tensor.chunk(layout.microbatches)[0] for name, tensor in batch.items()}
        runs = trial_runs(
            self._parts,
            [layout.rank_of(index) for index in range(len(layout.stages))],
            self._family.inputs(micro),
            self._family.keywords(micro),
            self.group,
            self._device,
            count_words=self._one_device_random,
        )
        self.stages = [
            self._make_stage(
                part,
                index,
                len(layout.stages),
                self._device.current,
                input_args=tuple(each.on_meta() for each in runs[index].inputs),
                output_args=tuple(each.on_meta() for each in runs[index].outputs),
                group=self.group,
            )
            for index, part in self._parts.items()
        ]
        if self._one_device_random:
            self._random = StageRandom(self._device.generator, [run.words for run in runs])
            for stage in self.stages:
                stage.random = self._random
        self._schedule = layout.schedule.build(self.stages, layout.microbatches, self._loss)
        self._shapes = shapes

    def forward_backward(
        self, batch: Mapping[str, Tensor], parts: int, *, last: bool, scale: float = 1.0
    ) -> Tensor:
        """Accumulates the gradients of one of ``parts`` microbatches; returns its loss.

        Gradients, times ``scale``, of plans are reduced in the ``last`` one.
        """
        batch = self._with_masks(batch)
        with self._unreduced_gradients():
            losses = self._run(self._schedule.step, batch, scale / parts)
        if last and self._plan_parts:
            self._reduce_gradients()
        if last:
            add_gradients(self.tied, self.group)
        return self._sum(losses) / scale

    def evaluate(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss of a microbatch, by forwards alone; gradients are disabled."""
        batch = self._with_masks(batch)
        return self._sum(self._run(self._schedule.eval, batch, 1.0))

    def _with_masks(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Prepares a batch; under a plan its stages get masks of documents for its positions."""
        if not self._has_masks:
            self.prepare(batch)
            return batch
        from plan_api import AttentionMask

        data, each = self._degrees.data, self._degrees.cp * self._degrees.tp
        # The pipeline's axis is the outermost of the ranks.
        own = dist.get_rank() % (data * each) // each
        rows = batch[POSITIONS].chunk(self._layout.microbatches)
        rest = {name: tensor for name, tensor in batch.items() if name != POSITIONS}
        self.prepare(rest)
        masks = [AttentionMask.of_position_ids(one.chunk(data)[own]) for one in rows]
        for stage in self.stages:
            stage.masks = masks
        return rest

    @property
    def parts(self) -> list[nn.Module]:
        """The parallelized parts of the model that this rank's stages compute with."""
        return list(self._parts.values())

    def _run(
        self, run: Callable[..., Any], batch: Mapping[str, Tensor], share: float
    ) -> list[Tensor]:
        """Runs the schedule; returns losses of this rank's stages, of ``share`` of their mean."""
        self._share = share / self._layout.microbatches
        inputs = self._family.inputs(batch) if 0 in self._parts else ()
        keywords = self._family.keywords(batch)
        # torch takes losses with targets only; the last stage has computed them already.
        target = next(iter(keywords.values())) if self._layout.last in self._parts else None
        losses: list[Tensor] = []
        if self._random is not None:
            self._random.begin()
        for z_loss in self._z_losses:
            z_loss.scale = self._share
        run(*inputs, target=target, losses=losses, return_outputs=False, **keywords)
        for z_loss in self._z_losses:  # of stages without a loss, to whose outputs it is attached
            losses += [value * self._share for value in z_loss.attached]
            z_loss.attached.clear()
        if self._random is not None:
            self._random.end(self._layout.microbatches)
        return losses

    def _sum(self, losses: Sequence[Tensor]) -> Tensor:
        """Returns the sum over ranks of the losses of their stages, on all."""
        loss = torch.zeros((), dtype=torch.float64, device=self._device.current)
        for each in losses:
            loss += each.detach()
        dist.all_reduce(loss, group=self.group)
        return loss

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        del target
        return output * self._share

    def _unreduced_gradients(self) -> ExitStack:
        """Disables a plan's gradient reduction for the microbatches of the schedule."""
        stack = ExitStack()
        if self._plan_parts:
            from plan_api import installed

            for part in self._plan_parts:
                stack.enter_context(installed(part).gradients.no_sync())
        return stack

    def _reduce_gradients(self) -> None:
        """Reduces the gradients of plans, which are accumulated over the schedule."""
        from plan_api import installed

        for part in self._plan_parts:
            installed(part).gradients.reduce()


def _parameter(model: nn.Module, name: str) -> nn.Parameter:
    """Returns a parameter; an attribute of its name may be what a plan's modules compute with."""
    return dict(model.named_parameters())[name]
