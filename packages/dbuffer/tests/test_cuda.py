"""Buffers on a GPU: streams wait by events, NCCL's collectives are in place."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dbuffer import DBuffer, MemoryPool, memory_size
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import mesh_of_one

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

S0, R = Shard(0), Replicate()
LAYOUT = plan_layout([TensorSpec("a", 1 << 22, 1, (2048, 2048)), TensorSpec("b", 3)], 1)


@pytest.fixture
def mesh():
    with mesh_of_one("cuda") as mesh:
        yield mesh


def given():
    torch.manual_seed(0)
    return {"a": torch.randn(2048, 2048, device="cuda"), "b": torch.randn(3, device="cuda")}


def test_a_buffer_works_as_on_the_host(mesh):
    small = DBuffer(LAYOUT, mesh, [S0], torch.float32)
    small.copy_from(given())
    full = DBuffer(LAYOUT, mesh, [S0], torch.bfloat16, full=True)
    view = full.view("a")
    for _ in range(2):
        full.release()
        assert view.untyped_storage().nbytes() == 0
        full.acquire()
        full.copy_(small)
        full.all_gather_(async_op=True).wait()
        assert torch.equal(view, given()["a"].bfloat16())
    grad = DBuffer(LAYOUT, mesh, [Partial("avg")], torch.float32)
    grad.copy_from(given())
    grad.reduce_scatter_()
    assert torch.equal(grad.dtensor("a").full_tensor(), given()["a"])


def test_nccl_is_native_and_exchange_is_refused(mesh):
    with pytest.raises(ValueError, match=r"CPU .*'exchange', got cuda"):
        DBuffer(LAYOUT, mesh, [S0], torch.float32, strategy="exchange")


def test_a_release_on_another_stream_waits_for_it_without_record_stream(mesh):
    full, side = DBuffer(LAYOUT, mesh, [R], torch.float32), torch.cuda.Stream()
    full.copy_from(given())
    side.wait_stream(torch.cuda.current_stream())
    nbytes, before = full.nbytes, torch.cuda.memory_allocated()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # the reader is late
        total = full.view("a").double().sum()
        full.release()
    # At once and not when the GPU has got there, as record_stream would have it.
    assert torch.cuda.memory_allocated() <= before - nbytes + 4096
    other = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")  # the same memory, on this stream
    torch.cuda.synchronize()
    assert torch.allclose(total, given()["a"].double().sum())
    del other


def test_a_block_waits_for_the_stream_that_had_it(mesh):
    pool, side = MemoryPool("cuda"), torch.cuda.Stream()
    block = pool.take(memory_size(LAYOUT, torch.float32))
    first = DBuffer(LAYOUT, mesh, [S0], torch.float32, memory=block)
    first.copy_from(given())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        total = first.view("a").double().sum() if first.full else first.shard("a").double().sum()
        first.release()
    second = DBuffer(LAYOUT, mesh, [S0], torch.float32, memory=block)
    second.zero_()  # on this stream, which has waited
    torch.cuda.synchronize()
    assert torch.allclose(total, given()["a"].double().sum())
    second.release()
    pool.give_back(block)
    assert pool.trim() > 0


def test_pinned_memory_is_copied_from_without_blocking(mesh):
    host = DBuffer(LAYOUT, mesh, [S0], torch.float32, "cpu", pin_memory=True)
    assert host.local.is_pinned()
    host.copy_from({name: tensor.cpu() for name, tensor in given().items()})
    full = DBuffer(LAYOUT, mesh, [S0], torch.float32, full=True)
    full.copy_(host, non_blocking=True)
    full.all_gather_()
    assert torch.equal(full.view("a"), given()["a"])
