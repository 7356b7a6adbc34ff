"""A small model, and `fully_shard` called on it with the options of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_map

import fsdp
from fsdp import FSDPModule
from fsdp.quantized import Tiles

WIDTH, WORDS = 8, 16
BLOCKS = 3
BLOCK = 7  # elements
FACTOR = 3.0  # of set_gradient_divide_factor
HOOK_SCALE = 4.0  # of set_all_reduce_hook

_SHAPES = {"one axis": (1, 2, 1), "two axes": (2, 2, 1), "four ranks": (1, 4, 1)}
_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
_GRANULARITIES: dict[str, Callable[[nn.Parameter], Any]] = {
    "rows": lambda param: fsdp.Rows(2),
    "block": lambda param: fsdp.Block(BLOCK),
    "whole": lambda param: fsdp.Whole(),
    "shard": lambda param: torch.distributed.tensor.Shard(0),
}


# Operators that make shards; their results are `Bfloat16Parameter`s, too.
_VIEWS_AND_COPIES = {
    "chunk", "split", "narrow", "slice", "detach", "clone", "_to_copy", "alias", "view",
    "new_zeros", "empty_like", "zeros_like",
}  # fmt: skip


class TwoLinearBlock(nn.Module):
    """Two Linears with a residual; `gain` may be ignored, and `unused` never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(60))  # so that a shard ends within a row

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Takes (rows, WIDTH) and a factor of any dtype; computes in that of its parameters."""
        y: Tensor = self.down(torch.tanh(self.up(x.to(self.down.bias.dtype))))
        return x + (y * self.gain.to(y.dtype) * weight.to(y.dtype)).to(x.dtype)


class BlockModel(nn.Module):
    """An embedding, whose backward needs no parameters, blocks, and a Linear of the root."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(TwoLinearBlock() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Takes integers (rows,) and a factor; returns (rows, 4)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, weight)
        out: Tensor = self.head(x.to(self.head.weight.dtype))
        return out

    @property
    def parts(self) -> list[nn.Module]:
        """The modules that are sharded before the root, in the order of forward."""
        return [self.embed, *self.blocks]


class Bfloat16Parameter(Tensor):
    """A parameter with FSDP2's all-gather extensions, which gather bfloat16."""

    @staticmethod
    def __new__(cls: type[Bfloat16Parameter], data: Tensor) -> Bfloat16Parameter:
        """Wraps a tensor."""
        wrapper: Bfloat16Parameter = Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )
        return wrapper

    def __init__(self, data: Tensor) -> None:
        self.wrapped = data

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes func, too
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Computes with the wrapped tensors; results of views and copies are wrapped again."""

        def plain(value: Any) -> Any:
            return value.wrapped if isinstance(value, cls) else value

        def wrap(value: Any) -> Any:
            return cls(value) if isinstance(value, Tensor) else value

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        return (
            tree_map(wrap, result) if func.overloadpacket.__name__ in _VIEWS_AND_COPIES else result
        )

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        """Returns this rank's chunk."""
        return (self.wrapped.bfloat16(),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Returns the parameter, or fills ``out``."""
        if out is not None:
            out.data.copy_(outputs[0])
            return None
        param = outputs[0].to(dtype, copy=True)
        return param, (param,)


@dataclass(frozen=True)
class IssuedReduction:
    """A reduce-scatter.

    Attributes:
        group: the process group's name.
        average: whether it is a mean, and not a sum.
    """

    group: str
    average: bool


@dataclass
class CustomCollectives:
    """The recorded calls of the user's collectives."""

    gathers: int = 0
    reductions: list[IssuedReduction] = field(default_factory=list)


# Since 2.13 the old names warn.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Allocator:
    def __init__(self, seen: CustomCollectives) -> None:
        self.seen = seen

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _RecordingAllGather(_Allocator, AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        self.seen.gathers += 1
        work = _ALL_GATHER(output_tensor, input_tensor, group, async_op=async_op)
        return cast("dist.Work | None", work)


class _RecordingReduceScatter(_Allocator, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.seen.reductions.append(IssuedReduction(group.group_name, op == dist.ReduceOp.AVG))
        work = _REDUCE_SCATTER(output_tensor, input_tensor, op, group, async_op)
        return cast("dist.Work | None", work)


@dataclass(frozen=True)
class ShardedModel:
    """A model that `fully_shard` was called on.

    Attributes:
        model: the root.
        ignored: ignored parameters.
        comms: calls of the user's collectives.
        hooked: dtypes of the shards that the all-reduce hook got.
    """

    model: Any
    ignored: tuple[nn.Parameter, ...]
    comms: CustomCollectives
    hooked: list[torch.dtype]


def ranks_of(options: Mapping[str, Any]) -> int:
    """Returns the ranks of a run: two, and four where its mesh has two axes or larger shards."""
    return 2 if options.get("mesh", "one axis") == "one axis" else 4


def build(options: Mapping[str, Any], blocks: int = BLOCKS) -> ShardedModel:
    """Makes the model, shards it and calls the methods that the options name.

    Args:
        options: options of a run.
        blocks: number of blocks of the model.

    Raises:
        ValueError: the options are refused.
    """
    model = BlockModel(blocks)
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh("cpu", _SHAPES[options.get("mesh", "one axis")], mesh_dim_names=names)
    own = mesh[names[:2]] if options.get("mesh") == "two axes" else mesh["shard"]
    _parallelize_blocks(model, mesh, options.get("parameters", "plain"))
    arguments, ignored = _arguments(model, options)
    for part in model.parts:
        fsdp.fully_shard(part, mesh=own, **arguments)
    root = fsdp.fully_shard(model, mesh=own, **arguments)
    sharded = ShardedModel(root, ignored, CustomCollectives(), [])
    _call_methods(sharded, options)
    return sharded


def _parallelize_blocks(model: BlockModel, mesh: DeviceMesh, kind: str) -> None:
    for block in model.blocks:
        if kind == "DTensor":
            plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        elif kind == "extension":
            up = cast(TwoLinearBlock, block).up
            up.weight = nn.Parameter(Bfloat16Parameter(up.weight.detach()))


def _arguments(
    model: BlockModel, options: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[nn.Parameter, ...]]:
    found = {
        name: options[name]
        for name in ("reshard_after_forward", "strategy", "placements")
        if name in options
    }
    policy = {name: options[name] for name in _POLICY if name in options}
    if policy:
        found["mp_policy"] = fsdp.MixedPrecisionPolicy(**policy)
    if "shard_placement_fn" in options:
        found["shard_placement_fn"] = _GRANULARITIES[options["shard_placement_fn"]]
    if "quantize_fn" in options:
        found["quantize_fn"] = lambda param: Tiles(rows=2, cols=4) if param.ndim == 2 else None
    if "offload_policy" in options:
        found["offload_policy"] = fsdp.CPUOffloadPolicy()
    ignored: tuple[nn.Parameter, ...] = ()
    if "ignored_params" in options:
        ignored = (cast(TwoLinearBlock, model.blocks[len(model.blocks) // 2]).gain,)
        found["ignored_params"] = set(ignored)
    return found, ignored


def _call_methods(sharded: ShardedModel, options: Mapping[str, Any]) -> None:
    """Calls the methods that are set once; `observation` calls those of each backward."""
    model = sharded.model
    parts = model.parts
    for name in ("set_reshard_after_backward", "set_keep_unsharded_storage",
                 "set_reduce_scatter_unused_params", "set_reduce_scatter_max_input_buffers",
                 "set_separate_reduce_scatter_group"):  # fmt: skip
        if name in options:
            getattr(model, name)(options[name])
    if "set_manual_backward_finalization" in options:
        model.set_manual_backward_finalization(True)
    if "set_unshard_in_backward" in options:
        model.embed.set_unshard_in_backward(False)
    if "set_modules_to_forward_prefetch" in options:
        parts[1].set_modules_to_forward_prefetch([parts[-1]])
    if "set_modules_to_backward_prefetch" in options:
        parts[-1].set_modules_to_backward_prefetch([parts[1]])

    def hook(shard: Tensor) -> None:
        sharded.hooked.append(shard.dtype)
        if "set_all_reduce_hook" in options:
            shard.mul_(HOOK_SCALE)

    gather, reduce = _RecordingAllGather(sharded.comms), _RecordingReduceScatter(sharded.comms)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.set_all_reduce_hook(hook)
        if "set_gradient_divide_factor" in options:
            module.set_gradient_divide_factor(FACTOR)
        if "set_force_sum_reduction_for_comms" in options:
            module.set_force_sum_reduction_for_comms(True)
        if "set_custom_all_gather" in options:
            module.set_custom_all_gather(gather)
        if "set_custom_reduce_scatter" in options:
            module.set_custom_reduce_scatter(reduce)
        if "set_allocate_memory_from_process_group_for_comm" in options:
            module.set_allocate_memory_from_process_group_for_comm(True)
