"""What differs between the versions of torch that are supported, each with a canary test.

Importing this module checks that torch is the one that the extension module was compiled for.
"""

from __future__ import annotations

import logging
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.compiler.config
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, _api, _collective_utils, _redistribute, _utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import utils as _strategies
from torch.distributed.tensor.placement_types import Placement, Replicate

from dtensor_rules._built_for import TORCH_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh


def minor(version: str) -> str:
    """``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.split(".")[:2])


def require_torch(built_for: str, found: str) -> None:
    """Refuses another minor version than the one compiled for: its C++ interfaces are others.

    Raises:
        ImportError: they differ.
    """
    if minor(built_for) != minor(found):
        raise ImportError(
            f"dtensor_rules was compiled for torch {minor(built_for)} and finds torch {found}. "
            f"Build it for this torch: pip install --no-build-isolation --force-reinstall "
            f"--no-deps dtensor-rules. Until then DTensor works as ever, without it."
        )


require_torch(TORCH_VERSION, torch.__version__)

# Of torch._C: empties the cache that torch's own dispatch has in C++.
CLEAR = "_clear_DTensor_sharding_propagator_cache"

# Of torch.distributed.distributed_c10d: what `destroy_process_group` ends with, for the world and
# for one group.
UNREGISTER = ("_unregister_all_process_groups", "_unregister_process_group")

RELEASE = tuple(int(part) for part in minor(torch.__version__).split("."))


def strategy_tables() -> list[dict[Any, Any]]:
    """Returns torch's tables of operators with sharding strategies."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return [
        propagator.op_strategy_funcs,
        propagator.op_single_dim_strategy_funcs,
        propagator.op_to_rules,
    ]


def schema_info(op: torch._ops.OpOverload) -> Any:
    """Returns the `RuntimeSchemaInfo` of an operator, or None, as `unwrap_to_op_info`."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op)
    if info is None:
        info = propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    return info


def forget_decisions() -> None:
    """Empties torch's caches of transforms and of sharding decisions, those of this thread."""
    _redistribute._gen_transform_infos.cache_clear()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    getattr(torch._C, CLEAR)()


def redistribution_transforms(src: DTensorSpec, dst: DTensorSpec) -> list[Any]:
    """Returns the transforms of torch's redistribution, before any are merged.

    Nothing stays in torch's caches, which have no bound: a caller that plans often remembers what
    it made of the plan instead.

    Args:
        src: of the tensor as it is; this rank is in its mesh.
        dst: of the tensor as it should be, on the same mesh.

    Returns:
        torch's ``_TransformInfo``, in order.

    Raises:
        Exception: whatever torch raises for specs that it cannot redistribute between.
    """
    _utils.assert_no_mixed_partial_types(src.placements)
    _utils.assert_no_mixed_partial_types(dst.placements)
    planners: dict[Any, Any] = _redistribute._planner_cache
    key = (weakref.ref(src.mesh), src.tensor_meta)
    known = key in planners
    try:
        return _redistribute._gen_transform_infos_non_cached(src, dst)
    finally:
        if not known:
            planners.pop(key, None)


#: Torch's own function that merges transforms, also while another is in its place.
merged_by_torch: Callable[..., list[Any]] = _redistribute._optimize_transform_infos
MERGE = "_optimize_transform_infos"  # of torch.distributed.tensor._redistribute
TRANSFORMS = "_gen_transform_infos_non_cached"  # of the same, which caches what it returns


def transform_of_axes(src: Placement, mesh: DeviceMesh, axes: tuple[int, ...]) -> Any:
    """Makes a transform to Replicate on several axes at once, which torch applies by `src`."""
    return _redistribute._FlattenedTransformInfo(
        mesh_dim=axes[0],
        src_dst_placements=(src, Replicate()),
        logical_shape=(),
        mesh=mesh,
        original_mesh_dims=axes,
    )


def is_tracing() -> bool:
    """Whether a compiler or exporter records what is called."""
    return _redistribute._are_we_tracing()


def merges_transforms() -> bool:
    """Whether torch may merge collectives over several mesh axes; a flag of its own says no."""
    return not _redistribute._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION


def flattened_mesh(mesh: DeviceMesh, axes: tuple[int, ...]) -> DeviceMesh | None:
    """Returns the mesh that these axes, ascending, were flattened into; None if they were not."""
    return _redistribute._get_flattened_mesh_by_layout(mesh, axes)


def flattenings(mesh: DeviceMesh) -> int:
    """Returns the number of meshes made by flattening axes of this mesh's root mesh."""
    return len(mesh._get_root_mesh()._flatten_mapping)


def default_group(mesh: DeviceMesh) -> str | None:
    """Returns the default group's name if its ranks are this mesh's in the same order, or None.

    It must also be able to send this mesh's tensors.
    """
    world: Any = distributed_c10d._get_default_group()
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(world.size())):
        return None
    if torch.device(mesh.device_type) not in world._device_types:
        return None
    name: str = world.group_name
    return name


def partial_second_stays() -> bool:
    """Whether a replica plus a partial sum is a partial sum; 2.11 reduces it first."""
    return RELEASE >= (2, 12)


def explicit_redistribution_only() -> Any:
    """Returns the `threading.local` of the active context of this name."""
    return _utils.ExplicitRedistributionContext._local


def compiles_for_other_ranks() -> bool:
    """Whether coordinates and groups are symbols, for torch compiles on one rank for all."""
    flags: Any = torch.compiler.config
    if not hasattr(flags, "compile_on_one_rank"):  # it was here before 2.14
        from torch.distributed import config as flags
    return bool(flags.compile_on_one_rank)


def all_to_all_gathers(mesh: DeviceMesh) -> bool:
    """Whether torch gathers and chunks instead of an all-to-all on this mesh.

    It logs this once a process, and so does this function, through the same logger: together they
    log it once.
    """
    if mesh.device_type != "cpu":
        return False
    from torch._logging import warning_once
    from torch.distributed.tensor import _collective_utils

    logger: logging.Logger = _collective_utils.logger
    warning_once(
        logger,
        "CPU process group does not support alltoall yet, falling back with allgather + chunk!",
    )
    return True


def gradient_placements(placements: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the placements that `from_local` expects of its gradient."""
    return _api._normalize_placements_for_grad(placements)


def gradient_argument(placements: object) -> dict[str, object]:
    """`from_local`'s keyword for the placements of its gradient, which 2.11 does not have.

    It is passed only where it says something: so 2.11 refuses it, in its own words, where it is
    used.
    """
    return {} if placements is None else {"grad_placements": placements}


def redistribute_context(spec: DTensorSpec, dtype: torch.dtype) -> Any:
    """Returns the context of `Redistribute.backward` after a plain forward.

    Args:
        spec: of the forward's input.
        dtype: of its local tensor.
    """
    return types.SimpleNamespace(
        current_spec=spec,
        async_op=False,
        bwd_op_dtype=dtype,
        bwd_out_dtype=dtype,
        backward_dtype=None,  # what was said of dtypes before 2.13
        original_dtype=dtype,
    )


def to_local_context(spec: DTensorSpec, stride: tuple[int, ...]) -> Any:
    """Returns the context of `_ToTorchTensor.backward` after a plain forward.

    Args:
        spec: of the forward's input.
        stride: of its local tensor; torch reads it from 2.14 on.
    """
    return types.SimpleNamespace(
        dtensor_spec=spec, grad_placements=None, local_tensor_stride=stride
    )


# What `expand_to_full_mesh_op_strategy` and the costs it compares are, by version; see expansion.py
# and costs.py.

#: Torch's own function, also while another is in its place.
expand_to_full_mesh: Any = _strategies.expand_to_full_mesh_op_strategy
#: Its option for a condition of the operator's own.
VALIDITY_OPTION = "full_mesh_strategy_filter" if RELEASE >= (2, 14) else "is_valid_strategy_cb"
#: Whether candidates with partial values of several kinds in one tensor are left out.
MIXED_PARTIALS_ARE_REFUSED = RELEASE >= (2, 12)
#: Whether the result of an in-place operator must be placed as its first input, which must stay.
IN_PLACE_RESULT_IS_CHECKED = RELEASE >= (2, 12)
#: Whether strided shards of candidates stand for an order of axes where those of the inputs do.
STRIDED_ORDER_IS_PASSED_ON = RELEASE >= (2, 12)
#: Whether a strided shard counts among the shards of a tensor, in costs.
STRIDED_SHARDS_COUNT = RELEASE >= (2, 12)
#: Whether the specs of a list of results are a tuple even where there is one.
LISTS_OF_ONE_ARE_TUPLES = RELEASE >= (2, 14)
#: Whether the graph search turns a shard into a partial sum where the target is one.
SHARDS_BECOME_SUMS = RELEASE >= (2, 14)


def checked_outs(op: torch._ops.OpOverload) -> list[str]:
    """Returns the ``out=`` arguments whose placements results must have, by result."""
    outs = [argument.name for argument in op._schema.arguments if argument.is_out]
    if RELEASE >= (2, 13):
        return outs
    return ["out"] if "out" in outs else []


def mesh_topology(mesh: DeviceMesh) -> Any:
    """Returns the `MeshTopoInfo` with which torch estimates the times of collectives.

    Torch keeps those that it makes, and their meshes, for ever; this one is the caller's.
    """
    build: Any = _collective_utils.MeshTopoInfo.build_from_mesh
    return build.__wrapped__(mesh)


def redistributes_by_graph() -> bool:
    """Whether torch is set to plan every redistribution by its graph search."""
    return bool(_redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN)
