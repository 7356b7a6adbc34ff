"""Whether the ranks' generators agree, as everything here takes for granted."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def require_equal_generators(mesh: DeviceMesh, generator: torch.Generator | None = None) -> None:
    """Compare the generators of all ranks of ``mesh``; every rank of it must call this.

    Two small all-reduces per mesh axis.

    Args:
        mesh: the ranks that draw together.
        generator: the one to compare; by default torch's for the mesh's device type.

    Raises:
        RuntimeError: on every rank, where they differ.
    """
    digest = _digest(mesh, generator)
    smallest = torch.tensor(digest, device=mesh.device_type)
    largest = smallest.clone()
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    if int(smallest) != int(largest):
        raise RuntimeError(
            f"the generators of the ranks of {mesh} differ (this rank's state hashes to"
            f" {digest:016x}): shards would not fit together; call torch.manual_seed with one seed"
            " on every rank, and draw the same plain tensors on all of them or from generators of"
            " their own"
        )


class FirstDrawCheck:
    """Calls ``require_equal_generators`` once per mesh, before the first draw there."""

    def __init__(self) -> None:
        self.enabled = False
        self._checked: set[Any] = set()

    def reset(self, *, enabled: bool) -> None:
        """Forget what was checked."""
        self.enabled = enabled
        self._checked.clear()

    def __call__(self, mesh: DeviceMesh, generator: torch.Generator | None) -> None:
        """Check, if it is wanted and has not been done."""
        if self.enabled and mesh not in self._checked and mesh.get_coordinate() is not None:
            self._checked.add(mesh)
            require_equal_generators(mesh, generator)


first_draw_check = FirstDrawCheck()


def _digest(mesh: DeviceMesh, generator: torch.Generator | None) -> int:
    if generator is not None:
        state = generator.get_state()
    elif mesh.device_type == "cuda":
        state = torch.cuda.get_rng_state()
    else:
        state = torch.get_rng_state()
    # 63 bits: a signed integer that no backend has trouble with.
    return int.from_bytes(hashlib.sha256(bytes(state.tolist())).digest()[:8]) >> 1
