"""The gather of an extension group: what the hooks give, as bytes, in one all-gather."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dbuffer import DBuffer, Handle, ResizableMemory
from fsdp.chunks import chunk_layout, chunk_rows
from fsdp.meshes import sharded_placements
from fsdp.optimizers import mark_stale
from fsdp.parameter import ManagedParameter

if TYPE_CHECKING:
    from fsdp.extension import ExtensionGroup

__all__ = ["ExtensionGatherer"]

ALIGNMENT = 16  # bytes, of each gathered tensor in a rank's shard


@dataclass(frozen=True)
class _Form:
    """Shape and dtype of a tensor that a hook gave."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ExtensionGatherer:
    """`fsdp.gather.Gather` by ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

    All tensors of all parameters go through one buffer of bytes; what comes out is copied to where
    the hooks see each tensor whole, as in FSDP2.

    Args:
        group: whose sharded parameters it gathers.
    """

    def __init__(self, group: ExtensionGroup) -> None:
        self._group = group
        self._forms: list[list[_Form]] = []  # of each parameter's tensors; known after the first
        self._buffer: DBuffer | None = None  # uint8, a chunk for each rank and tensor, ours
        self._outputs: list[ResizableMemory] = []  # each tensor of all ranks, in one order
        self._inner: list[list[torch.Tensor]] = [[] for _ in group.params]  # the hooks' own
        self._metadata: list[Any] = []
        self._handle: Handle | None = None
        self._copied: Any = None

    @property
    def under_way(self) -> bool:
        """As of `Gather`."""
        return self._handle is not None

    def start(self, *, for_backward: bool) -> None:
        """As of `Gather`."""
        group = self._group
        with group.streams.on(group.streams.gather), torch.no_grad():
            given = [self._ask(param) for param in group.params]
            self._metadata = [metadata for _, metadata in given]
            buffer = self._buffer_for([tensors for tensors, _ in given])
            own = [_bytes_of(tensor) for tensors, _ in given for tensor in tensors]
            first = group.rank * len(own)
            buffer.set_placements(sharded_placements(group.mesh))
            buffer.copy_from({first + j: tensor for j, tensor in enumerate(own)})
            self._copied = group.streams.record()
            self._handle = buffer.all_gather_(async_op=True)

    def finish(self) -> None:
        """As of `Gather`."""
        assert self._handle is not None
        assert self._buffer is not None
        group, buffer = self._group, self._buffer
        group.streams.wait(self._copied)
        self._handle.wait()
        self._handle = self._copied = None
        count = len(self._outputs)
        with torch.no_grad():
            for output in self._outputs:
                if not output.allocated:
                    output.acquire()
            whole = [output.bytes.tensor_split(group.ranks) for output in self._outputs]
            parts = [(whole[j][r], r * count + j) for r in range(group.ranks) for j in range(count)]
            torch._foreach_copy_([to for to, _ in parts], [buffer.view(i) for _, i in parts])
            buffer.release()
            flat = iter(self._outputs)
            for i, param in enumerate(group.params):
                outputs = tuple(self._as_given(next(flat), form) for form in self._forms[i])
                self._make(i, param, outputs)
                param.follow()
        self._metadata = []

    def release(self, *, after_forward: bool) -> None:
        """As of `Gather`; nothing is kept for backward."""
        if self._group.keeps_memory:
            return
        for output in self._outputs:
            output.release()
        for tensor in (tensor for tensors in self._inner for tensor in tensors):
            if tensor.untyped_storage().size():
                tensor.untyped_storage().resize_(0)

    def forget_kept(self) -> None:
        """As of `Gather`: there is nothing."""

    def _ask(self, param: ManagedParameter) -> tuple[Sequence[torch.Tensor], Any]:
        """What a parameter's first hook gives."""
        group, sharded = self._group, param.sharded
        local: Any = sharded._local_tensor  # type: ignore[attr-defined]
        if local.device != group.device:
            local = local.to(group.device, non_blocking=True)
        hook = local.fsdp_pre_all_gather
        mesh = group.mesh
        if mesh.ndim > 1:
            assert mesh.mesh_dim_names is not None
            mesh = mesh[mesh.mesh_dim_names[-1]]
        count = len(inspect.signature(hook).parameters)
        if count == 1:
            given, metadata = hook(mesh)
        elif count == 5:
            module, policy = param.places[0].module, group.mp_policy
            given, metadata = hook(mesh, sharded.size(), sharded.stride(), module, policy)
        else:
            raise ValueError(
                f"fsdp: fsdp_pre_all_gather of {param.name!r} takes {count} arguments; wants "
                f"(mesh, outer_size, outer_stride, module, mp_policy), or (mesh)"
            )
        _check_padded(given, local, group, param)
        return given, metadata

    def _buffer_for(self, given: Sequence[Sequence[torch.Tensor]]) -> DBuffer:
        """The buffer that takes these tensors, held.

        Raises:
            RuntimeError: they have other shapes or dtypes than at first.
        """
        group = self._group
        forms = [[_Form(tuple(t.shape), t.dtype) for t in tensors] for tensors in given]
        if self._buffer is None:
            self._forms = forms
            named = [
                (f"{param.name}, gathered {j}", form)
                for param, own in zip(group.params, forms, strict=True)
                for j, form in enumerate(own)
            ]
            shapes = [(form.nbytes * group.ranks,) for _, form in named]
            layout = chunk_layout(
                [name for name, _ in named], shapes, group.ranks, alignment=ALIGNMENT
            )
            self._buffer = DBuffer(
                layout, group.mesh, sharded_placements(group.mesh), torch.uint8, group.device,
                full=True, strategy=group.comms, name=lambda: group.names,
            )  # fmt: skip
            self._outputs = [ResizableMemory(shape[0], group.device) for shape in shapes]
        elif forms != self._forms:
            i = next(i for i, own in enumerate(forms) if own != self._forms[i])
            raise RuntimeError(
                f"fsdp: fsdp_pre_all_gather of {group.params[i].name!r} gave {forms[i]}, and "
                f"{self._forms[i]} before; wants the same shapes and dtypes always"
            )
        else:
            self._buffer.acquire()
        return self._buffer

    def _as_given(self, output: ResizableMemory, form: _Form) -> torch.Tensor:
        """What all ranks gave, behind each other along dim 0."""
        shape = (self._group.ranks * form.shape[0], *form.shape[1:])
        return output.bytes.view(form.dtype).view(shape)

    def _make(self, i: int, param: ManagedParameter, outputs: tuple[torch.Tensor, ...]) -> None:
        """Makes the unsharded parameter of the gathered tensors, or fills it anew."""
        local: Any = param.sharded._local_tensor  # type: ignore[attr-defined]
        dtype, metadata = self._group.compute_dtype, self._metadata[i]
        if param.unsharded is not None:
            for tensor in self._inner[i]:
                size = tensor.numel() * tensor.itemsize
                if tensor.untyped_storage().size() != size:
                    tensor.untyped_storage().resize_(size)
            local.fsdp_post_all_gather(outputs, metadata, dtype, out=param.unsharded)
            return
        whole, inner = local.fsdp_post_all_gather(outputs, metadata, dtype)
        wanted = param.sharded.shape
        if whole.shape[1:] != wanted[1:] or whole.shape[0] < wanted[0]:
            raise RuntimeError(
                f"fsdp: fsdp_post_all_gather of {param.name!r} gave a tensor of "
                f"{tuple(whole.shape)}; wants {tuple(wanted)}"
            )
        if whole.shape != wanted:  # the last chunks are padded
            whole = torch.as_strided(whole, wanted, param.sharded.stride(), 0)
        self._inner[i] = list(inner)
        param.unsharded = nn.Parameter(whole, requires_grad=param.sharded.requires_grad)
        mark_stale(param.unsharded, param.name)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _check_padded(
    given: Sequence[torch.Tensor], local: torch.Tensor, group: ExtensionGroup, param: Any
) -> None:
    """Raises where a shorter chunk than the others' gives less than they do.

    Raises:
        RuntimeError: naming the parameter; on the ranks that have such chunks only.
    """
    rows = chunk_rows(param.sharded.shape[0], group.ranks, 0)
    if local.shape[0] != rows and any(t.shape[:1] != (rows,) for t in given):
        raise RuntimeError(
            f"fsdp: {param.name!r} of {tuple(param.sharded.shape)} is cut unevenly over "
            f"{group.ranks} ranks, and its fsdp_pre_all_gather gave "
            f"{[tuple(t.shape) for t in given]}; wants tensors padded to {rows} rows"
        )
