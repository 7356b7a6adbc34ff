"""The entry point ``plan_api.fully_shard``, by which plan-api calls `fsdp.fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor.placement_types import Placement

from fsdp import api
from fsdp.mesh import checked_reshard
from fsdp.mesh.granularity import Block, Granularity, Rows, Whole, block_size
from fsdp.mesh.roles import named_roles
from fsdp.param_group import FSDPParamGroup
from fsdp.quantized.arguments import (
    check_axes_of_tiles,
    checked_block,
    checked_tiles,
    keeps_blocks,
)
from fsdp.quantized.tiles import Tiles
from fsdp.state import state_of
from fused_comm.narrow_sums import checked_send_dtype
from ragged_shard import even_shape, largest_shape

__all__ = ["fully_shard"]


class _FullyShard:
    """Shards the modules of a plan: `check` is called for each entry, then this for each module."""

    # The classes of values that plans may have for parameters.
    granularities = (Rows, Block, Whole)
    quantizations = (Tiles,)

    def check(
        self,
        *,
        placements: str | None = None,
        reshard_after_forward: bool | int | None = None,
        ndim: int = 1,
        ranks: int = 1,
        other_axes: Sequence[str] = (),
        send_dtype: torch.dtype | None = None,
    ) -> None:
        """Checks the options of an entry.

        Args:
            placements: as of `__call__`.
            reshard_after_forward: as of `__call__`.
            ndim: axes of the mesh.
            ranks: that one copy of the parameters is sharded over.
            other_axes: of the plan, on which parameters are DTensors.
            send_dtype: as of `__call__`.

        Raises:
            ValueError: nothing is sent in this dtype; there are no such placements on these axes,
                or with these options; or parameters cannot be resharded to this number of ranks.
        """
        checked_send_dtype("fully_shard", send_dtype)
        if reshard_after_forward is not None:
            checked_reshard(reshard_after_forward, ranks)
        if placements is None:
            return
        roles = named_roles(placements, ndim)
        if roles.shards_over_replicas and other_axes:
            raise ValueError(
                f"fully_shard: expected a plan without other axes for placements={placements!r}, "
                f"which shards the optimizer state over replicas, got {tuple(other_axes)}; take "
                f"placements='hsdp'"
            )
        if roles.keeps_parameters and reshard_after_forward:
            raise ValueError(
                f"fully_shard: expected reshard_after_forward=None or False with "
                f"placements={placements!r}, which keeps parameters unsharded, got "
                f"{reshard_after_forward!r}; leave it out, or take placements='zero3'"
            )

    def check_values(
        self,
        name: str,
        param: nn.Parameter,
        placements: Sequence[Placement],
        ranks: Sequence[int],
        *,
        granularity: Granularity | None,
        quantize: Tiles | None,
    ) -> None:
        """Checks the granularity and the quantization of one parameter.

        Args:
            name: of the parameter, for errors.
            param: of any dtype, before it is placed.
            placements: of the parameter on the axes that fully_shard does not shard along.
            ranks: of these axes.
            granularity: None is the default.
            quantize: None: it is not quantized.

        Raises:
            ValueError: they are out of range, or the parameter is no matrix; or the granularity or
                other axes split tiles.
        """
        shape = largest_shape(param.shape, ranks, placements)
        block = block_size(granularity, shape, name)
        tiles = checked_tiles(quantize, param, None, name, extension=False)
        if tiles is not None:
            is_uneven = even_shape(param.shape, ranks, placements) is None
            check_axes_of_tiles(tiles, param, shape, placements, name, is_uneven=is_uneven)
            checked_block(tiles, granularity, block, shape, name)

    def keeps_blocks(
        self, granularity: Granularity | None, block: int, shape: Sequence[int]
    ) -> bool:
        """Returns whether a granularity splits no block of so many elements of a parameter."""
        return keeps_blocks(block, block_size(granularity, tuple(shape), "weight"), shape)

    def __call__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh,
        reshard_after_forward: bool | int | None = None,
        shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
        quantize_fn: Callable[[nn.Parameter], Any] | None = None,
        ignored_params: Collection[nn.Parameter] = (),
        grad_placements_fn: api.GradPlacementsFn | None = None,
        placements: str | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
        send_dtype: torch.dtype | None = None,
    ) -> None:
        """Calls `fsdp.fully_shard` for one module.

        Args:
            module: that is sharded, in place.
            mesh: of the axes that shard it.
            reshard_after_forward: as of `fsdp.fully_shard`.
            shard_placement_fn: as of `fsdp.fully_shard`.
            quantize_fn: as of `fsdp.fully_shard`.
            ignored_params: as of `fsdp.fully_shard`.
            grad_placements_fn: as of `fsdp.fully_shard`.
            placements: as of `fsdp.fully_shard`, by name.
            mp_policy: as of `fsdp.fully_shard`; None: the dtypes of the parameters.
            offload_policy: as of `fsdp.fully_shard`; None: nothing is offloaded.
            send_dtype: as of `fsdp.fully_shard`.

        Raises:
            ValueError: as `fsdp.fully_shard`.
        """
        api.fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn,
            quantize_fn=quantize_fn,
            grad_placements_fn=grad_placements_fn,
            ignored_params=set(ignored_params),
            placements=placements,
            mp_policy=mp_policy or MixedPrecisionPolicy(),
            offload_policy=offload_policy or OffloadPolicy(),
            send_dtype=send_dtype,
        )

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """Gathers all parameters of a model, and reduces no gradients, inside of the block.

        Modules have their unsharded parameters in it, and may run forward and backward, as to
        compare them with others. Gradients that were accumulated before stay as they are; if the
        block raises they are dropped, as by `FSDPModule.reset_iter_state`.

        Args:
            model: with the modules of a plan; all ranks call it, as parameters are gathered.
        """
        states = list(dict.fromkeys(filter(None, map(state_of, model.modules()))))
        for state in states:
            if state.is_root is None:  # it makes settings that are restored below
                state._lazy_init()
        groups = [group for state in states for group in state.groups]
        settings = [_Settings.of(group) for group in groups]
        for state in states:
            state.context.streams.all_gather_waits()
            state.unshard()
        for group in groups:
            _Settings(False, False, False).set(group)
        try:
            yield
        except BaseException:
            for state in states:
                if state.is_root:
                    state.reset()
            raise
        finally:
            for group, before in zip(groups, settings, strict=True):
                before.set(group)
                group.reshard()


@dataclass(frozen=True)
class _Settings:
    """What a group does after a forward and a backward."""

    reshards_after_forward: bool
    reshards_after_backward: bool
    reduces_grads: bool

    @classmethod
    def of(cls, group: FSDPParamGroup) -> _Settings:
        return cls(
            group.reshard_after_forward,
            group.reshard_after_backward,
            group.reduce_scatter.reduce_grads,
        )

    def set(self, group: FSDPParamGroup) -> None:
        group.reshard_after_forward = self.reshards_after_forward
        group.reshard_after_backward = self.reshards_after_backward
        group.reduce_scatter.reduce_grads = self.reduces_grads


fully_shard = _FullyShard()
