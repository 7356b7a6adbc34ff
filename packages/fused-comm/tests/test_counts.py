"""The collectives and copies of a step, on fake meshes."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_comm import GradReducer
from testkit import CommLog, fake_mesh

R, P, S0 = Replicate(), Partial(), Shard(0)


def local(mesh, shape, placements):
    rows = [mesh.size(axis) for axis, placement in enumerate(placements) if placement == S0]
    return torch.ones(shape[0] // (rows[0] if rows else 1), *shape[1:])


def dtensor(mesh, shape, placements):
    shape = torch.Size(shape)
    stride = torch.empty(shape, device="meta").stride()
    data = local(mesh, shape, placements)
    return DTensor.from_local(data, mesh, placements, run_check=False, shape=shape, stride=stride)


def accumulate(reducer, params, source):
    """Accumulates gradients as backward does."""
    for param, placements in zip(params, source, strict=True):
        reducer.accumulate(param, dtensor(param.device_mesh, param.shape, placements))


class Copies(TorchDispatchMode):
    """The operators that copy more than flags, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        copies = any(word in name for word in ("copy", "clone", "cat", "pad", "stack"))
        if copies and func.namespace == "aten":
            made = args[0] if result is None or isinstance(args[0], list) else [result]
            if sum(tensor.numel() for tensor in made) > 4:
                self.names.append(name)
        return result


# On a mesh of data, context and tensor parallel axes: what sequence-parallel norms, column-parallel
# weights and an embedding that is sharded by data parallelism alone have for gradients.
KINDS = {
    "norm": ((8,), (R, R, R), (P, P, P), 6),
    "weight": ((8, 16), (R, R, S0), (P, P, S0), 6),
    "embedding": ((16, 4), (R, R, R), (P, R, R), 1),
}


@pytest.mark.parametrize("rank", [0, 5])
def test_collectives_are_buckets_times_sets_of_axes(rank):
    counts = {}
    with fake_mesh((2, 2, 2), ("dp", "cp", "tp"), rank=rank) as mesh:
        for fuse in (True, False):
            params, source = [], []
            for shape, target, pending, count in KINDS.values():
                params += [torch.nn.Parameter(dtensor(mesh, shape, target)) for _ in range(count)]
                source += [pending] * count
            reducer = GradReducer(params, fuse_axes=fuse, bucket_mb=600 / 2**20)
            for _ in range(2):
                with CommLog() as log:
                    accumulate(reducer, params, source)
                    reducer.finish()
                for param in params:
                    param.grad = None
            routes = [bucket.route for bucket in reducer.report().buckets]
            counts[fuse] = log.counts(), sorted(routes)
            assert reducer.report().collectives == sum(log.counts().values())
    # Two weights fill a bucket, and all norms are in one: three sets of axes, five buckets.
    over = ["all-reduce over 2", *["all-reduce over 4"] * 3, "all-reduce over 8"]
    assert counts[True] == ({"all_reduce": 5}, [f"{route}, float32" for route in over])
    assert counts[False][0] == {"all_reduce": 1 + 3 * 2 + 1 * 3}


# Seven rows on four ranks: uneven shards, one smaller.
@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("target", [(R,), (S0,)])
def test_gradients_are_copied_into_the_bucket_and_never_out(target, zero_copy):
    with fake_mesh((4,)) as mesh:
        params = [
            torch.nn.Parameter(distribute_tensor(torch.zeros(7, 8), mesh, target)) for _ in range(3)
        ]
        reducer = GradReducer(params, zero_copy=zero_copy)
        for step in range(3):
            for param in params:
                param.grad = None
            with Copies() as copies:
                accumulate(reducer, params, [(P,)] * 3)
                reducer.finish()
            in_place = zero_copy and target == (R,) and step > 0
            assert copies.names == ([] if in_place else ["_foreach_copy_"])
            storages = {p.grad.to_local().untyped_storage().data_ptr() for p in params}
            assert len(storages) == 1  # they are views of one buffer
