"""Clipping counts all of a gradient, whoever holds it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from integration.systems.clip import clip_gradients
from testkit import run_ranks

GRADIENTS = [torch.arange(12.0).view(4, 3), torch.ones(6), torch.full((4,), 2.0)]


@pytest.mark.ranks
@pytest.mark.parametrize("on_buffers", [False, True])
@pytest.mark.parametrize("most", [1.0, 1e3], ids=["clipped", "left alone"])
def test_shards_and_plain_tensors_count_together(most, on_buffers):
    def check():
        names = ("a", "b")
        both = init_device_mesh("cpu", (2, 1), mesh_dim_names=names)
        meshes = [init_device_mesh("cpu", (2,)), both, None]
        places = [[Shard(0)], [Shard(0), Replicate()], None]
        params = []
        for gradient, mesh, at in zip(GRADIENTS, meshes, places, strict=True):
            value = gradient if mesh is None else distribute_tensor(gradient, mesh, at)
            params.append(nn.Parameter(torch.zeros_like(value)))
            params[-1].grad = value.clone()
        norm = clip_gradients(params, most, on_buffers=on_buffers)
        found = [p.grad.full_tensor() if m else p.grad for p, m in zip(params, meshes, strict=True)]
        return norm, found

    wanted = [nn.Parameter(torch.zeros_like(gradient)) for gradient in GRADIENTS]
    for param, gradient in zip(wanted, GRADIENTS, strict=True):
        param.grad = gradient.clone()
    total = torch.nn.utils.clip_grad_norm_(wanted, most)
    for norm, found in run_ranks(check, 2):
        torch.testing.assert_close(norm, total)
        for clipped, param in zip(found, wanted, strict=True):
            torch.testing.assert_close(clipped, param.grad)


@pytest.mark.ranks
@pytest.mark.parametrize("on_buffers", [False, True])
def test_ranks_of_a_group_count_together_and_copies_once(on_buffers):
    """Both ranks have gradients of their own, and a copy of one that the first counts."""

    def check():
        rank = dist.get_rank()
        params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        params[0].grad = torch.full((3,), 1.0 + rank)
        params[1].grad = torch.full((3,), 4.0)
        unused = nn.Parameter(torch.zeros(2))
        copies = params[1:] if rank else []
        norm = clip_gradients(
            [*params, unused], 1.0, dist.group.WORLD, copies=copies, on_buffers=on_buffers
        )
        return norm, [param.grad for param in params]

    total = (3 * (1 + 4 + 16)) ** 0.5
    for rank, (norm, (own, shared)) in enumerate(run_ranks(check, 2)):
        torch.testing.assert_close(norm, torch.tensor(total))
        torch.testing.assert_close(own, torch.full((3,), (1.0 + rank) / total))
        torch.testing.assert_close(shared, torch.full((3,), 4.0 / total))
