"""A parameter in a buffer: what autograd saved outlives a release and a new gather."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.functional import linear

from dbuffer import DBuffer, MemoryPool, memory_size
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import fake_mesh, run_ranks

S0, R = Shard(0), Replicate()


def layout_of(tensors, world_size, alignment=4):
    specs = [TensorSpec(n, t.numel(), 1, tuple(t.shape)) for n, t in tensors.items()]
    return plan_layout(specs, world_size, alignment=alignment)


def weights():
    torch.manual_seed(0)
    return {"w1": torch.randn(6, 5), "b1": torch.randn(6), "w2": torch.randn(3, 6)}


def loss(w, x):
    return linear(torch.tanh(linear(x, w["w1"], w["b1"])), w["w2"]).square().sum()


def gathered_between(kind):
    """Gradients where the parameters' memory is released between forward and backward."""
    mesh = init_device_mesh("cpu", (2,))
    given = weights()
    layout = layout_of(given, 2)
    small = DBuffer(layout, mesh, [S0], torch.float32)
    small.copy_from(given)
    block = None
    if kind == "block":
        block = MemoryPool("cpu").take(memory_size(layout, torch.float32, full=True))
    full = DBuffer(layout, mesh, [S0], torch.float32, full=True, memory=block)
    params = {n: torch.nn.Parameter(full.view(n)) for n in given}
    full.release()

    def unshard():
        full.acquire()
        full.copy_(small)
        full.all_gather_()

    versions = [p._version for p in params.values()]
    x = torch.randn(4, 5, requires_grad=True)
    unshard()
    value = loss(params, x)
    full.release()
    if block is not None:
        block.bytes.fill_(0)  # as another buffer that has it in turn
    else:
        assert all(p.untyped_storage().nbytes() == 0 for p in params.values())
    unshard()
    assert [p._version for p in params.values()] == versions
    value.backward()
    reference = {n: t.clone().requires_grad_() for n, t in given.items()}
    loss(reference, x.detach()).backward()
    return all(torch.equal(params[n].grad, reference[n].grad) for n in given)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["resized", "block"])
def test_backward_reads_what_was_gathered_again(kind):
    assert run_ranks(gathered_between, 2, kind) == [True, True]


def test_a_write_to_a_view_itself_is_still_noticed():
    given = weights()
    with fake_mesh((1,)) as mesh:
        full = DBuffer(layout_of(given, 1), mesh, [R], torch.float32)
        full.copy_from(given)
        params = {n: torch.nn.Parameter(full.view(n)) for n in given}
        value = loss(params, torch.randn(4, 5, requires_grad=True))
        with torch.no_grad():
            params["w2"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


def test_tensors_are_ordinary_even_when_made_in_inference_mode():
    given = weights()
    with fake_mesh((1,)) as mesh:
        with torch.inference_mode():
            full = DBuffer(layout_of(given, 1), mesh, [R], torch.float32)
            view, dtensor = full.view("w1"), full.dtensor("w1")
        assert not view.is_inference()
        assert not dtensor.to_local().is_inference()
        assert not view._is_view()
