"""What may go on within a stage, on the ranks that share it, beside the pipeline between stages.

Every function takes a part of a model, the names of its layers and the mesh of the stage's ranks,
and returns the module that torch's PipelineStage is given. The parameters of the part keep their
names; what a package does to them is seen by every part of the rank's model that shares them.
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
    """Where and of what a part is, for those who parallelize it.

    Attributes:
        mesh: of the ranks that share the stage, one axis.
        layers: names of the part's layers.
        shape: of the whole model.
        degrees: as the system was given them.
    """

    mesh: DeviceMesh
    layers: Sequence[str]
    shape: ModelShape
    degrees: Degrees


def _alone(part: nn.Module, context: StageContext) -> nn.Module:
    del context
    return part


def _ddp(part: nn.Module, context: StageContext) -> nn.Module:
    return DistributedDataParallel(part, process_group=context.mesh.get_group())


def _fsdp2(part: nn.Module, context: StageContext) -> nn.Module:
    # Schedules gather a stage's parameters before its forwards and let go of them after its last
    # backward. Taken away in between, they are not those that a split backward looks for, which
    # then loses their gradients without a word.
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
        return part  # a plan is of layers; what is around them is whole on all ranks
    from integration.systems.zoo import plan_of
    from plan_api import parallelize

    return parallelize(part, plan_of(context.shape, context.mesh, context.degrees))


STAGE_SYSTEMS: dict[str, Callable[[nn.Module, StageContext], nn.Module]] = {
    "single": _alone,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "fsdp": _fsdp,
    "dtensor-tp": _dtensor_tp,
    "plan": _plan,
}
# The name of the axis of a stage's ranks, where it is not data parallelism.
TENSOR_PARALLEL = ("dtensor-tp", "plan")

_ALL = tuple(SCHEDULES)
# The schedules with which each trains as one device does (tests/test_pipeline_training.py).
SUPPORTED_SCHEDULES: dict[str, tuple[str, ...]] = dict.fromkeys(STAGE_SYSTEMS, _ALL) | {
    "ddp": ("1F1B",)
}
# Why not with the others: what torch says, or does.
UNSUPPORTED_REASONS: dict[str, str] = {
    "ddp": (
        "DDP's reducer rebuilds its buckets in the first backward, meets a parameter there once per"
        " microbatch, and asserts that it is once"
    ),
}


def check_degrees(degrees: Degrees, ranks: int) -> None:
    """Refuse degrees of a plan that go beyond the model's own forward.

    Raises:
        UsageError: naming them.
    """
    if degrees.dp_replicate * degrees.dp_shard > 1:
        raise UsageError(
            "within a pipeline a plan has --tp only, for the loss, which data parallelism scales,"
            " is not in a stage's forward; use --system fsdp2 or fsdp for data parallelism"
        )
    if degrees.ep > 1 or degrees.cp > 1:
        raise UsageError(
            "within a pipeline a plan has --tp only: --ep and --cp are of axes of data parallelism"
            " and of sequences; leave them out"
        )
    if degrees.loss_parallel or degrees.static:
        raise UsageError(
            "within a pipeline a plan takes neither --loss-parallel nor --static: the loss is not"
            " in a stage's forward; leave them out"
        )
    degrees.check(ranks)


def schedule_table() -> str:
    """Return which schedules go with which systems, as the Markdown table of the README."""
    lines = [
        f"| schedule | {' | '.join(f'`{name}`' for name in STAGE_SYSTEMS)} |",
        "|---|" + "---|" * len(STAGE_SYSTEMS),
    ]
    for schedule in SCHEDULES:
        cells = ["yes" if schedule in SUPPORTED_SCHEDULES[name] else "no" for name in STAGE_SYSTEMS]
        lines.append(f"| `{schedule}` | {' | '.join(cells)} |")
    return "\n".join(lines)
