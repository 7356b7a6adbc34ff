"""A communication hook for DistributedDataParallel.

Without `from __future__ import annotations`: DDP checks the hook's, which must not be strings.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from fused_comm import _compat
from fused_comm.bucket import Route
from fused_comm.process_groups import flat_group

__all__ = ["ddp_hook"]


def ddp_hook(
    mesh: dist.DeviceMesh,
    *,
    reduce_dtype: torch.dtype | None = None,
    op: Literal["sum", "avg"] = "avg",
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """Makes a hook that reduces DDP's buckets over all axes of a mesh in one collective.

    DDP's own group may be one axis of it: with `DistributedDataParallel(model, device_mesh=dp)`
    and the hook of the mesh of `dp` and `cp`, gradients of context parallel are summed as well.

    Args:
        mesh: whose ranks all have a part of the gradients.
        reduce_dtype: of the sums; by default that of the bucket.
        op: ``"avg"`` as DDP does it, or ``"sum"``.

    Returns:
        The hook, for `model.register_comm_hook(None, hook)`.
    """
    group = flat_group(mesh, range(mesh.ndim))

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        dtype = reduce_dtype or buffer.dtype
        before, after = Route((), (group,), dtype, buffer.device, op == "avg").divisors
        sent = buffer.to(dtype)
        if before != 1.0:
            sent.div_(before)
        work = _compat.all_reduce(sent, dist.ReduceOp.SUM, group.group)

        def finished(_: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            if after != 1.0:
                sent.div_(after)
            return sent if sent is buffer else buffer.copy_(sent)

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(finished)
        return future

    return hook
