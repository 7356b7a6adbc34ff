"""Memory: what a release returns, what a pool keeps, and where blocks begin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dbuffer import DBuffer, MemoryPool, MemorySlice, ResizableMemory, memory_size
from fused_comm import GradReducer
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import fake_mesh, run_ranks

S0, R = Shard(0), Replicate()
LAYOUT = plan_layout([TensorSpec("a", 1000), TensorSpec("b", 24)], 2, alignment=8)
F32 = torch.float32


def live_bytes():
    """Records what torch's allocator gives and takes back in a block of code."""
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )


def changes(profile, nbytes=None):
    """Bytes given (above 0) and taken back, in order; only those of a size, where one is given."""
    events = profile.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes()]
    return [size for size in sizes if nbytes in (None, abs(size))]


def test_a_release_returns_the_memory_at_once():
    with fake_mesh((2,)) as mesh, live_bytes() as profile:
        buffer = DBuffer(LAYOUT, mesh, [S0], F32, full=True)
        view, shard, dtensor = buffer.view("a"), buffer.shard("a"), buffer.dtensor("a")
        buffer.release()
        sizes = [t.untyped_storage().nbytes() for t in (view, shard, dtensor.to_local())]
        buffer.acquire()
        buffer.local.fill_(3.0)
        assert sizes == [0, 0, 0]
        assert shard[0] == view[0] == 3.0
    assert changes(profile, buffer.nbytes) == [buffer.nbytes, -buffer.nbytes, buffer.nbytes]


def test_an_acquired_buffer_is_placed_as_it_was_made():
    with fake_mesh((2,)) as mesh:
        buffer = DBuffer(LAYOUT, mesh, [Partial()], F32)
        buffer.reduce_scatter_()
        buffer.acquire()  # it is held: nothing happens
        assert buffer.placements == (S0,)
        buffer.release()
        buffer.release()  # nor here
        buffer.acquire()
        assert buffer.placements == (Partial(),)


def test_memory_of_its_own_is_held_once():
    memory = ResizableMemory(64, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"acquire: .*free memory"):
        memory.acquire()


def test_a_block_keeps_its_address_and_serves_buffers_in_turns():
    with fake_mesh((2,)) as mesh:
        pool = MemoryPool("cpu")
        block = pool.take(memory_size(LAYOUT, F32, full=True))
        first = DBuffer(LAYOUT, mesh, [R], F32, memory=block)
        address = first.view("a").data_ptr()
        first.release()
        second = DBuffer(LAYOUT, mesh, [R], torch.bfloat16, memory=block)
        assert not first.allocated
        assert second.allocated
        assert second.view("a").data_ptr() == address
        with pytest.raises(RuntimeError, match=r"acquire: .*free block"):
            first.acquire()
        with pytest.raises(RuntimeError, match="got a released"):
            first.zero_()
        second.release()
        with live_bytes() as profile:
            first.acquire()
        assert not changes(profile)
        assert first.view("a").data_ptr() == address


def test_several_buffers_lie_in_one_slab():
    sizes = [memory_size(LAYOUT, F32), memory_size(LAYOUT, F32, full=True), 100]
    pool = MemoryPool("cpu")
    with live_bytes() as profile:
        blocks = pool.take_many(sizes)
    assert len(changes(profile)) == 1
    assert len({block.bytes.untyped_storage().data_ptr() for block in blocks}) == 1
    with fake_mesh((2,)) as mesh:
        small = DBuffer(LAYOUT, mesh, [S0], F32, memory=blocks[0])
        full = DBuffer(LAYOUT, mesh, [R], F32, memory=blocks[1])
        small.local.fill_(1.0)
        full.local.fill_(2.0)
        assert (small.local == 1.0).all()
        assert pool.report().allocated == small.nbytes + full.nbytes
        assert pool.report().slabs == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=8), st.sampled_from([1, 4, 16, 64, 512, 4096]))
def test_blocks_are_aligned_and_apart(sizes, alignment):
    blocks = MemoryPool("cpu", alignment=alignment).take_many(sizes)
    for number, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        assert block.bytes.data_ptr() % alignment == 0
        assert size <= block.bytes.numel() < size + alignment
        block.bytes.fill_(number)
    assert all((block.bytes == number).all() for number, block in enumerate(blocks))


def test_a_buffer_may_ask_for_a_larger_alignment():
    with fake_mesh((2,)) as mesh:
        block = MemoryPool("cpu", alignment=4096).take(memory_size(LAYOUT, F32))
        buffer = DBuffer(LAYOUT, mesh, [S0], F32, memory=block, alignment=4096)
        assert buffer.local.data_ptr() % 4096 == 0


def test_a_free_block_is_taken_again_if_it_wastes_less_than_half():
    pool = MemoryPool("cpu")
    large, small = pool.take_many([1600, 800])
    pool.give_back(large)
    pool.give_back(small)
    assert pool.take(790) is small
    assert pool.take(790) not in (large, small)  # of 1600 more than half would be wasted
    assert pool.take(801) is large
    assert pool.report().slabs == 2


def test_trim_returns_slabs_of_which_nothing_is_taken():
    with live_bytes() as profile:
        pool = MemoryPool("cpu")
        in_use, gone = pool.take_many([160, 160])[0], pool.take(320)
        pool.give_back(gone)
        before = pool.report()
        del gone
        freed = pool.trim()
    after = pool.report()
    assert changes(profile)[-1] == -freed == after.reserved - before.reserved
    assert (after.slabs, after.peak_reserved) == (1, before.reserved)
    in_use.acquire()
    assert "in use 160 (peak 160)" in str(pool.report())


def test_a_block_is_given_back_once_and_not_while_it_is_held():
    pool = MemoryPool("cpu")
    block = pool.take(16)
    block.acquire()
    with pytest.raises(RuntimeError, match=r"give_back: .*free block"):
        pool.give_back(block)
    block.release()
    with pytest.raises(ValueError, match=r"give_back: .*this pool"):
        MemoryPool("cpu").give_back(block)
    pool.give_back(block)
    with pytest.raises(ValueError, match=r"give_back: .*given back"):
        pool.give_back(block)
    with pytest.raises(RuntimeError, match=r"acquire: .*given back"):
        block.acquire()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MemoryPool("cpu", alignment=12), "alignment .*power of two.*got 12"),
        (lambda: MemoryPool("cpu", alignment=0), "alignment .*power of two.*got 0"),
        (lambda: MemoryPool("cpu").take(-1), "block .*got -1"),
        (lambda: MemoryPool("cpu").allocate(1, F32, torch.device("meta")), "device cpu.*got meta"),
    ],
)
def test_what_a_pool_is_asked_is_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def reduced_in_a_pool():
    """fused-comm's reducer, its buckets in our pool."""
    mesh, pool = init_device_mesh("cpu", (2,)), MemoryPool("cpu")
    param = torch.nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [R]))
    reducer = GradReducer([("w", param)], allocate=pool.allocate)
    param.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    reducer.finish()
    return param.grad.to_local().tolist(), pool.report().peak_allocated >= 16


@pytest.mark.ranks
def test_fused_comm_takes_its_buckets_from_a_pool():
    assert run_ranks(reduced_in_a_pool, 2) == [([2.0] * 4, True)] * 2


def test_a_flat_buffer_is_released_to_the_pool():
    pool = MemoryPool("cpu")
    buffer = pool.allocate(10, torch.bfloat16, torch.device("cpu"))
    assert (buffer.data.shape, buffer.data.dtype) == ((10,), torch.bfloat16)
    address = buffer.data.data_ptr()
    buffer.release()
    assert pool.report().allocated == 0
    assert pool.allocate(5, F32, torch.device("cpu")).data.data_ptr() == address


def test_a_buffer_in_a_slice_of_anothers_memory_follows_it():
    """As one over the replicas of a shard."""
    inner = plan_layout([TensorSpec("half", LAYOUT.shard_size)], 2)
    with fake_mesh((2,)) as mesh:
        outer = DBuffer(LAYOUT, mesh, [S0], F32, full=True)
        nbytes = 4 * LAYOUT.shard_size
        memory = MemorySlice(outer.memory, nbytes, nbytes)
        buffer = DBuffer(inner, mesh, [R], F32, memory=memory)
        with pytest.raises(RuntimeError, match="one that a buffer uses"):
            DBuffer(inner, mesh, [R], F32, memory=memory)
        outer.release()
        outer.acquire()  # at another address
        outer.set_placements([R])
        outer.local.zero_()
        buffer.local.fill_(3.0)
        assert outer.local.sum() == 3.0 * LAYOUT.shard_size
        assert outer.local[LAYOUT.shard_size :].eq(3.0).all()
        buffer.release()
        assert outer.allocated
        assert DBuffer(inner, mesh, [R], F32, memory=memory).local[0] == 3.0
