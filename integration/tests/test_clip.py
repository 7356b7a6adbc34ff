"""Clipping counts all of a gradient, whoever holds it."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from integration.systems.clip import clip_gradients
from testkit import run_ranks

GRADIENTS = [torch.arange(12.0).view(4, 3), torch.ones(6), torch.full((4,), 2.0)]


@pytest.mark.ranks
@pytest.mark.parametrize("most", [1.0, 1e3], ids=["clipped", "left alone"])
def test_shards_and_plain_tensors_count_together(most):
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
        norm = clip_gradients(params, most)
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
