"""The all-gather of tensor subclasses with ``fsdp_pre_all_gather``, as torchao's and QLoRA's.

Note: such a parameter is sharded as FSDP2 shards it, along dim 0 into equal chunks, of which the
last may be shorter or empty. ``fsdp_pre_all_gather`` returns the tensors that are gathered in place
of a chunk: any number, of any dtypes, of the same sizes on every rank. ``fsdp_post_all_gather``
makes the unsharded parameter from the tensors of all ranks. A subclass whose unsharded parameter
does not use their memory may say so by a third hook (`RELEASE_HOOK`), and they are freed at once.
The signatures are those of torch/distributed/fsdp/_fully_shard/_fsdp_param.py, of 2.15.
Where a parameter is a DTensor on other axes (TP), its local tensor has the hooks and is sharded so;
the unsharded parameter is a DTensor of what ``fsdp_post_all_gather`` makes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from dbuffer import DBuffer, Handle, ResizableMemory
from fsdp.collectives.comm import BufferSpec, CommStreams
from fsdp.mesh import sharded_placements
from fsdp.param import RELEASE_HOOK, FSDPParam, chunk_rows
from fsdp.quantized.operands import TensorFormat
from ragged_shard.geometry.boxes import contiguous_strides
from ragged_shard.planner import Layout, TensorSpec

__all__ = ["ExtensionAllGather", "chunk_layout", "chunk_spec", "local_chunk"]

ALIGNMENT = 16  # bytes, of each gathered tensor in a rank's shard


def chunk_layout(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], ranks: int, *, alignment: int = 1
) -> Layout:
    """Returns a layout of the chunks of tensors along dim 0, each rank's chunks in its shard.

    Args:
        names: of the tensors; a chunk's is followed by its rank.
        shapes: of the tensors, of at least one dim.
        ranks: as many chunks of each tensor, and as many shards.
        alignment: elements, of which a chunk's offset in the shard is a multiple.
    """
    specs, offsets, end = [], [], 0
    for shape in shapes:
        offsets.append(end)
        numel = chunk_rows(shape[0], ranks, 0) * math.prod(shape[1:])
        end += -(-numel // alignment) * alignment
    for rank in range(ranks):
        for name, shape in zip(names, shapes, strict=True):
            own = (chunk_rows(shape[0], ranks, rank), *shape[1:])
            specs.append(TensorSpec(f"{name}[{rank}]", math.prod(own), 1, own))
    starts = [rank * end + offset for rank in range(ranks) for offset in offsets]
    return Layout(
        tuple(specs), ranks, alignment, align_starts=True, order=tuple(range(len(specs))),
        starts=tuple(starts), shard_size=end, proved_lower_bound=0, exact=False,
    )  # fmt: skip


def chunk_spec(param: FSDPParam, mesh: DeviceMesh) -> DTensorSpec:
    """Returns the spec of a sharded parameter, as FSDP2 has it.

    Args:
        param: of which there is the original parameter.
        mesh: of fully_shard, along whose last axis it is sharded.
    """
    shape, placements = param.orig_param.shape, sharded_placements(mesh)
    meta = TensorMeta(shape, contiguous_strides(shape), param.orig_param.dtype)
    inner = None if param.placement is None else param.placement.inner
    if inner is not None:
        mesh, others = inner.mesh, inner.placements
        sizes = mesh.shape[-len(others) :]
        parts = math.prod(n for n, one in zip(sizes, others, strict=True) if one.is_shard(0))
        shard = Shard(0) if parts == 1 else _StridedShard(0, split_factor=parts)
        placements = (*placements[:-1], shard, *others)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


class ExtensionAllGather:
    """Implements `GroupAllGather` by ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

    All tensors of all parameters are gathered in one buffer of bytes; they are copied out of it,
    as in FSDP2, because the hooks expect each tensor of all ranks to be contiguous.

    Args:
        params: whose sharded parameters are gathered.
        buffers: describes the buffers of the group.
        dtype: of the unsharded parameters.
        mp_policy: which the hooks get.
        streams: the root's, once that is known.

    Attributes:
        post_forward_mesh: None; parameters are resharded to all ranks.
    """

    post_forward_mesh: DeviceMesh | None = None

    def __init__(
        self,
        params: Sequence[FSDPParam],
        buffers: BufferSpec,
        dtype: torch.dtype,
        mp_policy: MixedPrecisionPolicy,
        streams: CommStreams,
    ) -> None:
        self._params, self._buffers, self._dtype = params, buffers, dtype
        self._mp_policy, self.streams = mp_policy, streams
        axis = buffers.mesh.ndim - 1
        self._rank, self._ranks = buffers.mesh.get_local_rank(axis), buffers.mesh.size(axis)
        self._formats: list[list[TensorFormat]] = []  # of each parameter's tensors, once known
        self._buffer: DBuffer | None = None  # uint8, a tensor for each rank and gathered tensor
        self._outputs: list[ResizableMemory] = []  # each gathered tensor, of all ranks
        # that fsdp_post_all_gather returned, for each parameter
        self._inner_tensors: list[list[torch.Tensor]] = [[] for _ in params]
        self._metadata: list[Any] = []
        self._handle: Handle | None = None
        self._copied_in: Any = None  # event: this rank's tensors are in the buffer

    @property
    def in_flight(self) -> bool:
        """Implements `GroupAllGather`."""
        return self._handle is not None

    @property
    def memory(self) -> None:
        """Implements `GroupAllGather`: each gathered tensor has its own."""

    def is_complete(self, *, for_backward: bool) -> bool:
        """Implements `GroupAllGather`."""
        return True

    def start(self, *, for_backward: bool) -> None:
        """Implements `GroupAllGather`."""
        streams = self.streams
        with streams.on(streams.all_gather), torch.no_grad():
            inputs = [self._pre_all_gather(param) for param in self._params]
            self._metadata = [metadata for _, metadata in inputs]
            buffer = self._acquire([tensors for tensors, _ in inputs])
            own = [_bytes_of(tensor) for tensors, _ in inputs for tensor in tensors]
            first = self._rank * len(own)
            buffer.set_placements(sharded_placements(self._buffers.mesh))
            buffer.copy_from({first + j: tensor for j, tensor in enumerate(own)})
            self._copied_in = streams.record()
            self._handle = buffer.all_gather_(async_op=True)

    def wait(self) -> None:
        """Implements `GroupAllGather`."""
        assert self._handle is not None
        assert self._buffer is not None
        buffer, ranks = self._buffer, self._ranks
        self.streams.wait(self._copied_in)
        self._handle.wait()
        self._handle = self._copied_in = None
        count = len(self._outputs)
        with torch.no_grad():
            for output in self._outputs:
                if not output.allocated:
                    output.acquire()
            chunks = [output.bytes.tensor_split(ranks) for output in self._outputs]
            pairs = [(chunks[j][r], r * count + j) for r in range(ranks) for j in range(count)]
            torch._foreach_copy_([to for to, _ in pairs], [buffer.view(i) for _, i in pairs])
            buffer.release()
            every = iter(self._outputs)
            for i, param in enumerate(self._params):
                formats = self._formats[i]
                outputs = [next(every) for _ in formats]
                gathered = tuple(map(self._gathered, outputs, formats))
                self._post_all_gather(i, param, gathered)
                param.sync_requires_grad()
                if _releases_outputs(param):
                    for output in outputs:
                        output.release()
        self._metadata = []

    def free(self, *, after_forward: bool, keep_storage: bool) -> None:
        """Implements `GroupAllGather`; there are no post-forward shards."""
        for output in self._outputs:
            output.release(keep_storage=keep_storage)
        for tensor in (tensor for tensors in self._inner_tensors for tensor in tensors):
            if tensor.untyped_storage().size() and not keep_storage:
                tensor.untyped_storage().resize_(0)

    def free_post_forward_shard(self) -> None:
        """Implements `GroupAllGather`; there is none."""

    def _pre_all_gather(self, param: FSDPParam) -> tuple[Sequence[torch.Tensor], Any]:
        """Calls a parameter's ``fsdp_pre_all_gather``."""
        local = local_chunk(param)
        if local.device != self._buffers.device:
            local = local.to(self._buffers.device, non_blocking=True)
        hook = local.fsdp_pre_all_gather
        mesh = self._buffers.mesh
        if mesh.ndim > 1:
            assert mesh.mesh_dim_names is not None
            mesh = mesh[mesh.mesh_dim_names[-1]]
        count = len(inspect.signature(hook).parameters)
        if count == 1:
            inputs, metadata = hook(mesh)
        elif count == 5:
            size = torch.Size(param.gathered_shape)
            stride = contiguous_strides(size)
            module = param.locations[0].module
            inputs, metadata = hook(mesh, size, stride, module, self._mp_policy)
        else:
            raise ValueError(
                f"fsdp: fsdp_pre_all_gather of {param.name!r} takes {count} arguments; expected "
                f"(mesh, outer_size, outer_stride, module, mp_policy), or (mesh)"
            )
        _check_padded(inputs, local, self._ranks, param)
        return inputs, metadata

    def _acquire(self, inputs: Sequence[Sequence[torch.Tensor]]) -> DBuffer:
        """Returns the buffer for these tensors, allocated.

        Raises:
            RuntimeError: they have other shapes or dtypes than at first.
        """
        params, ranks = self._params, self._ranks
        formats = [[TensorFormat(tuple(t.shape), t.dtype) for t in tensors] for tensors in inputs]
        if self._buffer is None:
            self._formats = formats
            named = [
                (f"{param.name}, gathered {j}", form)
                for param, own in zip(params, formats, strict=True)
                for j, form in enumerate(own)
            ]
            names, shapes = [name for name, _ in named], [(f.nbytes * ranks,) for _, f in named]
            layout = chunk_layout(names, shapes, ranks, alignment=ALIGNMENT)
            self._buffer = self._buffers.full_buffer(torch.uint8, layout)
            self._outputs = [ResizableMemory(shape[0], self._buffers.device) for shape in shapes]
        elif formats != self._formats:
            i = next(i for i, own in enumerate(formats) if own != self._formats[i])
            raise RuntimeError(
                f"fsdp: fsdp_pre_all_gather of {params[i].name!r} gave {formats[i]}, and "
                f"{self._formats[i]} before; expected the same shapes and dtypes always"
            )
        else:
            self._buffer.acquire()
        return self._buffer

    def _gathered(self, output: ResizableMemory, form: TensorFormat) -> torch.Tensor:
        """Returns the tensors of all ranks, concatenated along dim 0."""
        shape = (self._ranks * form.shape[0], *form.shape[1:])
        return output.bytes.view(form.dtype).view(shape)

    def _post_all_gather(
        self, i: int, param: FSDPParam, gathered: tuple[torch.Tensor, ...]
    ) -> None:
        """Calls ``fsdp_post_all_gather``: makes the unsharded parameter, or fills it again."""
        local, metadata = local_chunk(param), self._metadata[i]
        if param.unsharded_param is not None:
            for tensor in self._inner_tensors[i]:
                size = tensor.numel() * tensor.itemsize
                if tensor.untyped_storage().size() != size:
                    tensor.untyped_storage().resize_(size)
            local.fsdp_post_all_gather(gathered, metadata, self._dtype, out=param.unsharded_param)
            return
        unsharded, inner = local.fsdp_post_all_gather(gathered, metadata, self._dtype)
        shape = torch.Size(param.gathered_shape)
        if unsharded.shape[1:] != shape[1:] or unsharded.shape[0] < shape[0]:
            raise RuntimeError(
                f"fsdp: fsdp_post_all_gather of {param.name!r} gave a tensor of "
                f"{tuple(unsharded.shape)}; expected {tuple(shape)}"
            )
        if unsharded.shape != shape:  # the last chunks are padded
            unsharded = torch.as_strided(unsharded, shape, contiguous_strides(shape), 0)
        self._inner_tensors[i] = list(inner)
        param.init_unsharded_param(unsharded)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _check_padded(
    inputs: Sequence[torch.Tensor], local: torch.Tensor, ranks: int, param: FSDPParam
) -> None:
    """Checks that a shorter chunk is padded to the size of the others.

    Raises:
        RuntimeError: naming the parameter; on the ranks that have such chunks only.
    """
    shape = param.gathered_shape
    rows = chunk_rows(shape[0], ranks, 0)
    if local.shape[0] != rows and any(t.shape[:1] != (rows,) for t in inputs):
        raise RuntimeError(
            f"fsdp: {param.name!r} of {tuple(shape)} is sharded unevenly over {ranks} ranks, and "
            f"its fsdp_pre_all_gather gave {[tuple(t.shape) for t in inputs]}; expected tensors "
            f"padded to {rows} rows"
        )


def _releases_outputs(param: FSDPParam) -> bool:
    """Returns whether gathered tensors are not needed once ``fsdp_post_all_gather`` was called.

    Raises:
        ValueError: the hook returned no bool.
    """
    hook = getattr(local_chunk(param), RELEASE_HOOK, None)
    if hook is None:
        return False
    releases = hook()
    if not isinstance(releases, bool):
        raise ValueError(
            f"fsdp: {RELEASE_HOOK} of {param.name!r} must return a bool, got {releases!r}"
        )
    return releases


def local_chunk(param: FSDPParam) -> Any:
    """Returns this rank's chunk of a parameter, of the subclass."""
    sharded_param: Any = param.sharded_param
    return sharded_param._local_tensor
