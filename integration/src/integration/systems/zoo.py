"""Makes plans of the zoo for the models here, by degrees."""

import re
from collections.abc import Sequence
from math import lcm
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate, Shard

from fsdp import Rows
from integration.errors import UsageError
from integration.models import DeepseekV3Shape, ModelShape
from integration.systems.base import LayerPolicies, Precision
from integration.systems.degrees import Degrees
from integration.systems.fsdp import BLOCK_ROWS
from plan_api import RECIPES, Phase, Plan, UlyssesRing, zoo


def plan_of(
    shape: ModelShape,
    mesh: DeviceMesh,
    degrees: Degrees,
    *,
    in_pipeline: bool = False,
    apart: Sequence[str] = (),
    gathered: torch.dtype | None = None,
    balanced: bool = False,
    precision: Precision = "none",
) -> Plan:
    """Returns the plan of a model of ``shape``.

    Args:
        shape: shape of a model whose family the zoo has.
        mesh: mesh with the axes of ``degrees``.
        degrees: validated degrees.
        in_pipeline: whether fully_shard keeps parameters gathered between forward and backward, as
            the schedules of pipelines reshard them, after a stage's last backward.
        apart: names of modules that fully_shard is applied to, beside layers and root.
        gathered: dtype in which fully_shard gathers parameters; None: their own.
        balanced: whether context parallel ranks have tokens of equal area of each batch's mask.
        precision: recipe of the linear layers, whose blocks fully_shard does not split.
    """
    names = mesh.mesh_dim_names or ()
    # An axis of one rank, where there is no other, shards nothing: torch would not view a batch of
    # one sample along it.
    data = [axis for axis in names if axis in ("dp", "ep") and mesh[axis].size() > 1]
    tp = "tp" if "tp" in names else None
    options: dict[str, Any] = {"tp": tp, "sp": degrees.sp}
    if degrees.loss_parallel:
        options["loss_parallel"] = True
    if "cp" in names:
        in_groups = 1 < degrees.ulysses_degree < degrees.cp
        method = UlyssesRing(degrees.ulysses_degree) if in_groups else degrees.cp_method
        options |= {"cp": "cp", "cp_method": method}
        if balanced and degrees.cp_method != "ulysses":  # whose ranks have heads of all tokens
            options["cp_order"] = "balanced"
    if degrees.ep > 1:
        options |= {"ep": degrees.expert_axes or "tp", "ep_chunks": degrees.ep_chunks}
    if isinstance(shape, DeepseekV3Shape):
        options["dense"] = shape.first_k_dense_replace
    make = getattr(zoo, shape.family)
    # Several data parallel axes are of models with experts, which one of them shards.
    plan: Plan = make(mesh, dp=data if len(data) > 1 else next(iter(data), None), **options)
    if shape.family == "dit":
        plan = with_noise_loss(plan, *data)
    if degrees.zero3:
        plan.shard(r".*\.weight", Shard(0), "dp")
        plan.shard(r".*\.weight", Replicate(), "dp", Phase.RUN)
    elif degrees.dp_shard > 1:
        axes = [*data, *["cp"] * ("cp" in names)]
        modules = (re.escape(shape.layers) + r"\.\d+", *map(re.escape, apart), "")
        reshard = False if in_pipeline else None
        policies = {"reshard_after_forward": reshard, **_policies(degrees, gathered)}
        _fully_shard(plan, modules, axes, degrees, Rows(_block_rows(precision)), policies)
    return plan


def _block_rows(precision: Precision) -> int:
    """Returns the rows that stay on one rank: those of a block of an optimizer and of a recipe."""
    return (
        BLOCK_ROWS if precision == "none" else lcm(BLOCK_ROWS, RECIPES[precision]().feature_block)
    )


def add_layer_policies(plan: Plan, policies: LayerPolicies, shape: ModelShape, layers: int) -> None:
    """Adds entries for the layers that are recomputed, compiled and in low precision.

    Args:
        plan: plan of a model of ``shape``.
        policies: of the layers.
        shape: shape of the model.
        layers: number of the model's layers.
    """
    prefix = re.escape(shape.layers)
    if policies.recompute == "selective-layer":
        numbers = "|".join(map(str, range(0, layers, policies.every)))
        plan.recompute(rf"{prefix}\.({numbers})", "full")
    elif policies.recompute == "keep-dispatch":
        _keep_dispatched(plan, prefix, shape)
    elif policies.recompute != "none":
        plan.recompute(rf"{prefix}\.\d+", policies.recompute)
    if policies.compile != "none":
        plan.compile(rf"{prefix}\.\d+", policies.compile)
    if policies.precision != "none":
        plan.precision(policies.low_precision_path, RECIPES[policies.precision]())


def precision_error(policies: LayerPolicies, error: ValueError) -> UsageError | None:
    """Returns what a plan refuses as an error of ``--precision``; None if that is no reason.

    Args:
        policies: of the layers.
        error: of `plan_api.parallelize`.
    """
    if policies.precision == "none" or "precision(" not in str(error):
        return None
    return UsageError(f"--precision {policies.precision}: {error}")


def _keep_dispatched(plan: Plan, layers: str, shape: ModelShape) -> None:
    """Recomputes layers without a second dispatch of tokens, and those without experts."""
    dense = shape.first_k_dense_replace if isinstance(shape, DeepseekV3Shape) else 0
    first = "|".join(map(str, range(dense)))
    if dense:
        plan.recompute(rf"{layers}\.({first})", "full")
    plan.recompute(rf"{layers}\.(?!({first})$)\d+" if dense else rf"{layers}\.\d+", "keep-dispatch")


def with_noise_loss(plan: Plan, *dp: str) -> Plan:
    """Makes a plan of a `DiT` one of `DiffusionLoss`, which contains it.

    Args:
        plan: plan of the DiT.
        dp: axes along which batches are sharded; none: all ranks have the full batch.
    """
    plan = plan.under("model")
    if not dp:
        plan.redistribute("criterion.<in:target>", Replicate(), Replicate(), plan.axes[0])
    for axis in dp:
        plan.redistribute("criterion.<in:target>", Replicate(), Shard(0), axis)
        plan.annotate("criterion.<op:mse_loss>", Shard(0), axis)
        plan.redistribute("<out>", Partial(), Replicate(), axis)
    return plan


def _policies(degrees: Degrees, gathered: torch.dtype | None) -> dict[str, Any]:
    """Returns the policies of fully_shard: what is gathered, sent, when, and on the host."""
    found: dict[str, Any] = {"placements": degrees.placements}
    if gathered is not None:  # autocast around the model casts inputs
        found["mp_policy"] = MixedPrecisionPolicy(
            gathered, torch.float32, cast_forward_inputs=False
        )
    if degrees.offload:
        found["offload_policy"] = degrees.offload_policy
    if degrees.send_dtype is not None:
        found["send_dtype"] = degrees.dtype_sent
    return found


def _fully_shard(
    plan: Plan,
    modules: Sequence[str],
    axes: list[str],
    degrees: Degrees,
    granularity: Rows,
    policies: dict[str, Any],
) -> None:
    """Adds fully_shard of modules, the layers first, along some axes, flattened.

    Experts are sharded along the axes of ``ep`` by the plan, and along the others by fully_shard,
    where ``dp_shard`` and ``cp`` have ranks beyond those of ``ep``.
    """
    copies = degrees.dp_replicate
    options = {"granularity": granularity, **policies}
    if degrees.sends_tokens and degrees.dp_shard * degrees.cp > degrees.ep:
        rest = [axis for axis in axes if axis not in degrees.expert_axes]
        experts = rf"{modules[0]}\.mlp\.experts"
        plan.fully_shard(experts, rest, flat=len(rest) > 1, replicate=copies, **options)
    for path in modules:
        plan.fully_shard(path, axes, flat=len(axes) > 1, replicate=copies, **options)
