"""Checks that all ranks of a mesh have equal generators, which the handlers assume.

`fused_comm.agreement` compares hashes too: neither package depends on the other.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dist_rng.emulation.device import is_active


def require_equal_generators(mesh: DeviceMesh, generator: torch.Generator | None = None) -> None:
    """Compares the generators of all ranks of ``mesh``; all of its ranks must call this.

    It issues two all-reduces of one element per mesh axis.

    Args:
        mesh: the ranks that draw together.
        generator: the generator to compare; by default torch's for the mesh's device type.

    Raises:
        RuntimeError: on every rank, if the generators differ.
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
            f"expected equal generators on all ranks of {mesh}, got different ones (the hash of"
            f" this rank's state is {digest:016x}), whose shards do not make one tensor; call"
            " torch.manual_seed with one seed on every rank, and draw the same plain tensors on all"
            " of them or use separate generators for plain tensors"
        )


class FirstDrawCheck:
    """Calls ``require_equal_generators`` once per mesh, before the first draw there."""

    def __init__(self) -> None:
        self.enabled = False
        self._checked: set[Any] = set()

    def reset(self, *, enabled: bool) -> None:
        """Enables or disables the check, and clears the record of checked meshes."""
        self.enabled = enabled
        self._checked.clear()

    def __call__(self, mesh: DeviceMesh, generator: torch.Generator | None) -> None:
        """Checks the generators if the check is enabled and ``mesh`` was not checked yet."""
        if self.enabled and mesh not in self._checked and mesh.get_coordinate() is not None:
            self._checked.add(mesh)
            require_equal_generators(mesh, generator)


first_draw_check = FirstDrawCheck()


def _digest(mesh: DeviceMesh, generator: torch.Generator | None) -> int:
    if generator is not None:
        state = generator.get_state()
    elif mesh.device_type == "cpu" or (mesh.device_type != "cuda" and is_active()):
        state = torch.get_rng_state()  # an emulated GPU's, too
    else:
        state = torch.get_device_module(mesh.device_type).get_rng_state()
    # 63 bits fit the signed integers of all backends.
    return int.from_bytes(hashlib.sha256(bytes(state.tolist())).digest()[:8]) >> 1
