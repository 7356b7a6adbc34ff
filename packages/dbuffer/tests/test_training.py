"""All of it at once, by hand: two layers, each a group of buffers, trained on 2 x 2 ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.functional import linear

from dbuffer import DBuffer, MemoryPool, verify
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import run_ranks

pytestmark = pytest.mark.ranks

R, S0, AVG = Replicate(), Shard(0), Partial("avg")
SHAPES = [{"w": (7, 5), "b": (7,)}, {"w": (3, 7), "b": (3,)}]
STEPS, F32 = 3, torch.float32


def initial():
    torch.manual_seed(0)
    return [{n: torch.randn(s) for n, s in shapes.items()} for shapes in SHAPES]


def batch(step, rank):
    torch.manual_seed(100 * step + rank)
    return torch.randn(4, 5)


def loss(layers, x):
    for layer in layers:
        x = torch.tanh(linear(x, layer["w"], layer["b"]))
    return x.square().mean()


def alone():
    """On one device, over all ranks' batches."""
    layers = [{n: t.requires_grad_() for n, t in layer.items()} for layer in initial()]
    optimizer = torch.optim.AdamW([t for layer in layers for t in layer.values()], lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss(layers, batch(step, rank)) / 4 for rank in range(4)).backward()
        optimizer.step()
    return [{n: t.detach() for n, t in layer.items()} for layer in layers]


class Group:
    """A layer's buffers."""

    def __init__(self, mesh, tensors, memory):
        specs = [TensorSpec(n, t.numel(), t.shape[-1], tuple(t.shape)) for n, t in tensors.items()]
        layout = plan_layout(specs, mesh.size(1), alignment=4)
        self.shard = DBuffer(layout, mesh, [R, S0], F32)
        self.shard.copy_from(tensors)
        self.full = DBuffer(layout, mesh, [R, S0], F32, full=True, memory=memory)
        self.params = {n: torch.nn.Parameter(self.full.view(n)) for n in tensors}
        self.grad = DBuffer(layout, mesh, [AVG, AVG], F32)
        self.grad_shard = DBuffer(layout, mesh, [R, S0], F32)
        self.full.release()
        self.grad.release()

    def unshard(self):
        self.full.acquire()
        self.full.copy_(self.shard)
        self.full.all_gather_(async_op=True).wait()

    def reduce(self):
        self.full.release()
        self.grad.acquire()
        self.grad.copy_from({n: p.grad for n, p in self.params.items()})
        self.grad.reduce_scatter_(async_op=True).wait()
        self.grad.all_reduce_("dp")
        self.grad_shard.copy_(self.grad)
        self.grad.release()
        for param in self.params.values():
            param.grad = None


def trained(shared):
    """Each group's memory is its own, or one block that the groups have in turns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    block = None
    if shared:
        block = MemoryPool("cpu").take(4 * 1024)
    groups = [Group(mesh, tensors, block) for tensors in initial()]
    verify([group.shard for group in groups])
    names = [(group, n) for group in groups for n in group.params]
    weights = [torch.nn.Parameter(group.shard.dtensor(n)) for group, n in names]
    optimizer = torch.optim.AdamW(weights, lr=0.05)
    for step in range(STEPS):
        hooks = []
        for group in groups:  # a group is ready when the last of its gradients is there
            left = list(group.params.values())

            def ready(param, group=group, left=left):
                left.pop()
                if not left:
                    group.reduce()

            hooks += [p.register_post_accumulate_grad_hook(ready) for p in left]
        value = batch(step, dist.get_rank())
        for group in groups:
            group.unshard()
            value = torch.tanh(linear(value, group.params["w"], group.params["b"]))
            group.full.release()
            value.register_hook(lambda grad, group=group: group.unshard())
        value.square().mean().backward()
        for hook in hooks:
            hook.remove()
        for (group, n), weight in zip(names, weights, strict=True):
            weight.grad = group.grad_shard.dtensor(n)
        optimizer.step()
    found = [{n: group.shard.dtensor(n).full_tensor() for n in group.params} for group in groups]
    return found, [group.full.allocated or group.grad.allocated for group in groups]


@pytest.mark.parametrize("shared", [False, True], ids=["own memory", "one block in turns"])
def test_hybrid_sharded_layers_train_as_on_one_device(shared):
    wanted = alone()
    for found, allocated in run_ranks(trained, 4, shared):
        for layer, reference in zip(found, wanted, strict=True):
            for name, tensor in layer.items():
                torch.testing.assert_close(tensor, reference[name])
        assert allocated == [False, False]
