"""Parallelizes a pipeline stage over the ranks that share it.

Every function takes the part of a model on a stage and its `StageContext`, and returns the module
for torch's PipelineStage. Parameters keep their names; parts that share parameters see the changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from integration.errors import UsageError
from integration.models import ModelShape
from integration.pipeline.schedules import SCHEDULES
from integration.systems.degrees import Degrees
from integration.systems.dtensor_tp import layer_plan


@dataclass(frozen=True)
class StageContext:
    """The mesh and the layers of a stage.

    Attributes:
        mesh: one-dimensional mesh of the ranks that share the stage.
        layers: names of the stage's layers.
        shape: shape of the full model.
        degrees: degrees of the system.
    """

    mesh: DeviceMesh
    layers: Sequence[str]
    shape: ModelShape
    degrees: Degrees


def _single(part: nn.Module, context: StageContext) -> nn.Module:
    del context
    return part


def _ddp(part: nn.Module, context: StageContext) -> nn.Module:
    return DistributedDataParallel(part, process_group=context.mesh.get_group())


def _fsdp2(part: nn.Module, context: StageContext) -> nn.Module:
    # Schedules unshard a stage's parameters before its forwards and reshard them after its last
    # backward. If they were resharded in between, a split backward would not find its parameters
    # and silently lose their gradients.
    for name in context.layers:
        fully_shard(part.get_submodule(name), mesh=context.mesh, reshard_after_forward=False)
    fully_shard(part, mesh=context.mesh, reshard_after_forward=False)
    return part


def _fsdp(part: nn.Module, context: StageContext) -> nn.Module:
    import fsdp
    from integration.systems.fsdp import granularity

    for module in (*map(part.get_submodule, context.layers), part):
        fsdp.fully_shard(
            module,
            mesh=context.mesh,
            reshard_after_forward=False,
            shard_placement_fn=granularity,
        )
    return part


def _dtensor_tp(part: nn.Module, context: StageContext) -> nn.Module:
    for name in context.layers:
        plan = layer_plan(context.shape.family, local_attention=True)
        parallelize_module(part.get_submodule(name), context.mesh, plan)
    return part


def _plan(part: nn.Module, context: StageContext) -> nn.Module:
    if not context.layers:
        return part  # plans shard layers; the other modules are replicated
    from integration.systems.zoo import plan_of
    from plan_api import parallelize

    return parallelize(part, plan_of(context.shape, context.mesh, context.degrees))


STAGE_SYSTEMS: dict[str, Callable[[nn.Module, StageContext], nn.Module]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "fsdp": _fsdp,
    "dtensor-tp": _dtensor_tp,
    "plan": _plan,
}
# The name of the axis of a stage's ranks, where it is not data parallelism.
TENSOR_PARALLEL = ("dtensor-tp", "plan")

_ALL = tuple(SCHEDULES)
# Schedules under which each trains as one device does (tests/test_pipeline_training.py).
SUPPORTED_SCHEDULES: dict[str, tuple[str, ...]] = dict.fromkeys(STAGE_SYSTEMS, _ALL) | {
    "ddp": ("1F1B",)
}
# Why the other schedules are not supported.
UNSUPPORTED_REASONS: dict[str, str] = {
    "ddp": (
        "DDP's reducer rebuilds its buckets in the first backward and asserts that each parameter"
        " is ready once there, not once per microbatch"
    ),
}


def check_degrees(degrees: Degrees, ranks: int) -> None:
    """Refuses degrees of a plan that a pipeline stage does not support.

    Raises:
        UsageError: names them.
    """
    if degrees.dp_replicate * degrees.dp_shard > 1:
        raise UsageError(
            "--system plan with --pp-degree: expected only --tp, as data parallelism scales the"
            " loss, which is not in a stage's forward, got --dp-replicate or --dp-shard; use"
            " --system fsdp2 or fsdp for data parallelism"
        )
    if degrees.ep > 1 or degrees.cp > 1:
        raise UsageError(
            "--system plan with --pp-degree: expected only --tp, got --ep or --cp, which need"
            " other mesh axes; leave them out"
        )
    if degrees.loss_parallel or degrees.static:
        raise UsageError(
            "--system plan with --pp-degree: expected neither --loss-parallel nor --static, as the"
            " loss is not in a stage's forward; leave them out"
        )
    degrees.check(ranks)
