"""On a simulated accelerator: streams wait for the memory of buffers, collectives have the bits."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Shard

from dbuffer import DBuffer, MemoryPool, ResizableMemory
from ragged_shard.planner import TensorSpec, plan_layout
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks

S0 = Shard(0)
SHAPES = {"a": (6, 7), "b": (5,), "c": (1, 3)}


def on_another_stream(memory, **options):
    """Sums memory on a stream of its own, which waits for the current one, and releases it there.

    Returns the sum, which keeps its own memory from being freed on the wrong stream.
    """
    module = torch.get_device_module("sim")
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        total = memory.bytes.sum()
        memory.release(**options)
    return total


def test_a_block_waits_for_the_stream_that_used_it():
    def check():
        block = MemoryPool("sim").take(64)
        block.acquire()
        block.bytes.fill_(1)
        total = on_another_stream(block)
        block.acquire()
        block.bytes.fill_(2)
        torch.get_device_module("sim").synchronize()
        return total.item()

    assert run_sim_ranks(check, 1) == [64]


def test_released_memory_waits_for_the_stream_that_used_it():
    def check():
        memory = ResizableMemory(64, torch.device("sim"))
        memory.bytes.fill_(1)
        total = on_another_stream(memory)
        other = torch.zeros(64, dtype=torch.uint8, device="sim")  # which may have its place
        torch.get_device_module("sim").synchronize()
        return total.item(), other.sum().item()

    assert run_sim_ranks(check, 1) == [(64, 0)]


def test_kept_storage_waits_for_the_stream_that_used_it():
    """The stream that acquires it may be another than the one before."""

    def check():
        module = torch.get_device_module("sim")
        memory = ResizableMemory(64, torch.device("sim"))
        memory.bytes.fill_(1)
        address = memory.bytes.data_ptr()
        total = on_another_stream(memory, keep_storage=True)
        with module.stream(module.Stream()):
            memory.acquire()
            memory.bytes.fill_(2)
        module.synchronize()
        return total.item(), memory.bytes.data_ptr() == address

    assert run_sim_ranks(check, 1) == [(64, True)]


def test_memory_goes_back_to_the_stream_that_acquired_it():
    def check():
        module = torch.get_device_module("sim")
        memory = ResizableMemory(64, torch.device("sim"))
        memory.release()
        side = module.Stream()
        with module.stream(side):
            memory.acquire()
            memory.bytes.fill_(1)
        module.current_stream().wait_stream(side)
        total = memory.bytes.sum()
        memory.release()
        with module.stream(side):
            other = torch.zeros(64, dtype=torch.uint8, device="sim")
        module.synchronize()
        return total.item(), other.sum().item()

    assert run_sim_ranks(check, 1) == [(64, 0)]


def test_a_slab_is_returned_behind_the_streams_that_used_it():
    def check():
        pool = MemoryPool("sim")
        block = pool.take(64)
        block.acquire()
        block.bytes.fill_(1)
        total = on_another_stream(block)
        pool.give_back(block)
        del block
        freed = pool.trim()
        other = torch.zeros(64, dtype=torch.uint8, device="sim")
        torch.get_device_module("sim").synchronize()
        return total.item(), freed >= 64, other.sum().item()

    assert run_sim_ranks(check, 1) == [(64, True, 0)]


def results(device, shape):
    """Of every collective, at once and in the background: all tensors, on the host."""
    mesh = init_device_mesh(device, shape)
    specs = [TensorSpec(n, torch.Size(s).numel(), 1, s) for n, s in SHAPES.items()]
    layout = plan_layout(specs, shape[-1])
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = {name: torch.randn(size, generator=generator) for name, size in SHAPES.items()}
    on_device = {name: tensor.to(device) for name, tensor in given.items()}
    found = []
    for start, background in itertools.product((Partial(), Partial("avg")), (False, True)):
        buffer = DBuffer(layout, mesh, [start] * len(shape), torch.float32, strategy="native")
        buffer.copy_from(on_device)
        for collective in ("reduce_scatter_", "all_reduce_", "all_gather_"):
            if collective == "all_reduce_" and len(shape) == 1:
                continue
            handle = getattr(buffer, collective)(async_op=background)
            if background:
                handle.wait()
            found.append(buffer.local.to("cpu", copy=True))
        found += [buffer.view(name).to("cpu", copy=True) for name in SHAPES]
    return found


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_collectives_have_the_bits_of_the_cpu(shape):
    def check():
        pairs = zip(results("sim", shape), results("cpu", shape), strict=True)
        return [torch.equal(found, expected) for found, expected in pairs]

    for same in run_sim_ranks(check, torch.Size(shape).numel()):
        assert same
        assert all(same)


def test_pinned_memory_is_copied_from_without_blocking():
    def check():
        mesh = init_device_mesh("sim", (2,))
        layout = plan_layout([TensorSpec("a", 42, 1, (6, 7))], 2)
        host = DBuffer(layout, mesh, [S0], torch.float32, "cpu", pin_memory=True)
        host.copy_from({"a": torch.arange(42.0).view(6, 7)})
        full = DBuffer(layout, mesh, [S0], torch.float32, full=True)
        full.copy_(host, non_blocking=True)
        full.all_gather_()
        return host.local.is_pinned(), full.view("a").cpu().flatten().tolist()

    assert run_sim_ranks(check, 2) == [(True, [float(n) for n in range(42)])] * 2


def test_the_exchange_is_refused():
    def check():
        mesh = init_device_mesh("sim", (2,))
        layout = plan_layout([TensorSpec("a", 4)], 2)
        with pytest.raises(ValueError, match=r"CPU .*'exchange', got sim"):
            DBuffer(layout, mesh, [S0], torch.float32, strategy="exchange")

    run_sim_ranks(check, 2)


def test_a_group_without_a_backend_for_the_buffers_device_is_named():
    """As NCCL's is for a buffer on the CPU; no other rank is to blame."""

    def check():
        mesh = DeviceMesh.from_group(dist.new_group(backend="simccl"), "cpu")
        layout = plan_layout([TensorSpec("a", 4)], 2)
        buffer = DBuffer(layout, mesh, [Partial()], torch.float32)
        buffer.zero_()
        with pytest.raises(RuntimeError, match=r"No backend .* type cpu\nCall init_process_group"):
            buffer.reduce_scatter_()

    run_sim_ranks(check, 2)
