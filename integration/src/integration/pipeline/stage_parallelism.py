"""Parallelizes a pipeline stage over the ranks that share it.

Every function takes the part of a model on a stage and its `StageContext`, and returns the module
for torch's PipelineStage. Parameters keep their names; parts that share parameters see the changes.
"""

from collections.abc import Callable
from typing import cast

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from integration.pipeline.stage_context import StageContext
from integration.systems.dtensor_tp import layer_plan


def _single(part: nn.Module, context: StageContext) -> nn.Module:
    del context
    return part


def _ddp(part: nn.Module, context: StageContext) -> nn.Module:
    # The reducer of DistributedDataParallel rebuilds its buckets in the first backward and asserts
    # that each parameter is ready once there, not once per microbatch. This one does not, and
    # pipelines call it after a stage's last backward.
    return cast(nn.Module, replicate(part, mesh=context.mesh))


def _fsdp2(part: nn.Module, context: StageContext) -> nn.Module:
    # Schedules unshard a stage's parameters before its forwards and reshard them after its last
    # backward. If they were resharded in between, a split backward would not find its parameters
    # and silently lose their gradients.
    for module in (*map(part.get_submodule, context.layers), part):
        fully_shard(
            module,
            mesh=context.mesh,
            reshard_after_forward=False,
            offload_policy=context.degrees.offload_policy,
        )
    return part


def _fsdp(part: nn.Module, context: StageContext) -> nn.Module:
    import fsdp
    from integration.systems.fsdp import granularity

    for module in (*map(part.get_submodule, context.sharded_apart), part):
        fsdp.fully_shard(
            module,
            mesh=context.mesh,
            reshard_after_forward=False,
            shard_placement_fn=granularity,
            offload_policy=context.degrees.offload_policy,
            send_dtype=context.degrees.dtype_sent,
        )
    return part


def _dtensor_tp(part: nn.Module, context: StageContext) -> nn.Module:
    for name in context.layers:
        plan = layer_plan(context.shape.family, local_attention=True)
        parallelize_module(part.get_submodule(name), context.mesh, plan)
    return part


def _plan(part: nn.Module, context: StageContext) -> nn.Module:
    from integration.pipeline.stage_plan import parallelize_stage

    return parallelize_stage(part, context)


def check_stages(system: str, context: StageContext) -> None:
    """Refuses what a stage of this rank or another cannot have, on all ranks alike.

    Args:
        system: that parallelizes stages.
        context: of any stage.

    Raises:
        UsageError: a recipe of ``--precision`` does not fit a layer.
    """
    if system == "plan":
        from integration.pipeline.stage_plan import check_recipe

        check_recipe(context)


STAGE_SYSTEMS: dict[str, Callable[[nn.Module, StageContext], nn.Module]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "fsdp": _fsdp,
    "dtensor-tp": _dtensor_tp,
    "plan": _plan,
}
# Whose ranks share the batch of a stage.
TENSOR_PARALLEL = ("dtensor-tp",)
