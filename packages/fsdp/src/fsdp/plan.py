"""The entry point ``plan_api.fully_shard``, by which plan-api calls `fsdp.fully_shard`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp import api
from fsdp.mesh.granularity import Block, Granularity, Rows, Whole
from fsdp.mesh.roles import named_roles
from fsdp.param_group import FSDPParamGroup
from fsdp.state import state_of

__all__ = ["fully_shard"]


class _FullyShard:
    """Shards the modules of a plan: `check` is called for each entry, then this for each module."""

    def check(
        self,
        *,
        granularity: str | None,
        placements: str | None = None,
        reshard_after_forward: bool | None = None,
        ndim: int = 1,
        other_axes: Sequence[str] = (),
    ) -> None:
        """Checks the text of a granularity, and the placements of an entry.

        Args:
            granularity: as of `__call__`.
            placements: as of `__call__`.
            reshard_after_forward: as of `__call__`.
            ndim: axes of the mesh.
            other_axes: of the plan, on which parameters are DTensors.

        Raises:
            ValueError: there is no such granularity, with those that there are; or no such
                placements on these axes, or with these options.
        """
        if granularity is not None:
            _granularity(granularity)
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
                f"placements={placements!r}, which keeps parameters unsharded, got True; leave it "
                f"out, or take placements='zero3'"
            )

    def __call__(
        self,
        module: nn.Module,
        *,
        mesh: DeviceMesh,
        granularity: str | None = None,
        reshard_after_forward: bool | None = None,
        ignored_params: Collection[nn.Parameter] = (),
        grad_placements_fn: api.GradPlacementsFn | None = None,
        placements: str | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        offload_policy: OffloadPolicy | None = None,
    ) -> None:
        """Calls `fsdp.fully_shard` with one granularity for all parameters.

        Args:
            module: that is sharded, in place.
            mesh: of the axes that shard it.
            granularity: of all parameters: "rows(32)", "block(1024)" or "whole"; None is the
                default.
            reshard_after_forward: as of `fsdp.fully_shard`.
            ignored_params: as of `fsdp.fully_shard`.
            grad_placements_fn: as of `fsdp.fully_shard`.
            placements: as of `fsdp.fully_shard`, by name.
            mp_policy: as of `fsdp.fully_shard`; None: the dtypes of the parameters.
            offload_policy: as of `fsdp.fully_shard`; None: nothing is offloaded.

        Raises:
            ValueError: another granularity, or other placements.
        """
        parsed = None if granularity is None else _granularity(granularity)
        api.fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=None if parsed is None else lambda param: parsed,
            grad_placements_fn=grad_placements_fn,
            ignored_params=set(ignored_params),
            placements=placements,
            mp_policy=mp_policy or MixedPrecisionPolicy(),
            offload_policy=offload_policy or OffloadPolicy(),
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


def _granularity(text: str) -> Granularity:
    found = re.fullmatch(r"whole|(rows|block)(?:\((\d*)\))?", text.strip().lower())
    count = int((found and found[2]) or 1)
    if found is None or count < 1:
        raise ValueError(
            f"fully_shard: expected granularity='rows(n)' or 'block(n)' with n >= 1, or 'whole', "
            f"got {text!r}"
        )
    return Whole() if found[1] is None else Rows(count) if found[1] == "rows" else Block(count)
