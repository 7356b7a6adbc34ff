"""The paper's ablation: the same plan, hooks and collectives, without views of the buffer.

As in FSDP2 every parameter has memory of its own: shards are copied into a staging buffer, that is
gathered, and the parameters are copied out of it. The reduction needs no other: with a DBuffer,
too, gradients are copied into what is reduced, and each group's sharded gradients are one new
tensor.

Source: the ablation of veScale-FSDP's evaluation; torch's _fsdp_collectives.py.
"""

import torch

from dbuffer.memory import ResizableMemory
from dbuffer.views import tensor_in, tensor_shape
from fsdp.collectives.all_gather import PlannedAllGather
from fsdp.collectives.comm import BufferSpec
from fsdp.state import state_of


def without_buffers(model):
    """Makes sharded modules copy parameters in and out of what is gathered."""
    for module in model.modules():
        state = state_of(module)
        for group in state.groups if state is not None else ():
            group.all_gather = CopyingAllGather(group)


class CopyingAllGather(PlannedAllGather):
    """Copies shards in, gathers, and copies parameters out."""

    def __init__(self, group):
        buffers = BufferSpec(
            group.shard.layout, group.mesh, group.options.device, group.collectives, group.params
        )
        dtype, device = group.dtypes.compute, buffers.device
        super().__init__(group.shard, group.params, buffers, dtype, group.streams, None)
        # Unsharded parameters: each has its own memory, released when the group is resharded.
        sizes = [spec.numel * dtype.itemsize for spec in buffers.layout.specs]
        self._memories = [ResizableMemory(size, device) for size in sizes]
        # What modules have, and what is written: with versions of their own, as a DBuffer's.
        self._wholes, self._targets = (
            [
                tensor_in(memory.bytes, dtype, 0, tensor_shape(buffers.layout, i))
                for i, memory in enumerate(self._memories)
            ]
            for _ in range(2)
        )
        for memory in self._memories:
            memory.release()

    def start(self, *, for_backward):
        """Copies shards into the staging buffer and issues its gather."""
        with self.streams.on(self.streams.all_gather), torch.no_grad():
            if self._buffer is None:
                self._buffer = self._new_buffer()
            else:
                self._buffer.acquire()
            count = range(len(self._params))
            staged = [self._buffer.shard(i) for i in count]
            torch._foreach_copy_(staged, [self._shard.shard(i) for i in count])
            self._copied_in = self.streams.record()
            self._handle = self._buffer.all_gather_(async_op=True)

    def wait(self):
        """Copies parameters out, and frees the staging buffer."""
        buffer = self._buffer
        self.streams.wait(self._copied_in)
        self._handle.wait()
        self._handle = self._copied_in = None
        for memory in self._memories:
            memory.acquire()
        with torch.no_grad():
            staged = [buffer.view(i) for i in range(len(self._targets))]
            torch._foreach_copy_(self._targets, staged)
        buffer.release()
        for param, whole in zip(self._params, self._wholes, strict=True):
            if param.unsharded_param is None:
                param.init_unsharded_param(whole)
            param.sync_requires_grad()

    def free(self, *, after_forward, keep_storage):
        """Frees the parameters' memory."""
        for memory in self._memories:
            memory.release()
