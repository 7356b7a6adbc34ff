"""The shapes and dtypes of testkit's case table, ragged, against the replicated tensor."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ragged_shard
from ragged_shard import InterleavedShard, RaggedShard
from testkit import CommLog, assert_bitwise, cases, run_ranks

pytestmark = pytest.mark.ranks


def composition(total, parts, seed):
    """Random non-negative integers that add up to a total; zeros are likely."""
    generator = random.Random(seed)
    cuts = sorted(generator.randint(0, total) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def placements(shape, world_size, seed):
    """Placements of this package for a tensor of this shape on one axis."""
    owner = RaggedShard.owned_by(seed % world_size, world_size)
    numel = torch.Size(shape).numel()
    if not shape or not numel:
        return [owner, RaggedShard((0,), [1] * world_size)] if shape else [owner]
    found = [owner, RaggedShard((0,), composition(shape[0], world_size, seed))]
    found.append(RaggedShard(range(len(shape)), composition(numel, world_size, seed + 1)))
    found += [InterleavedShard(dim, 2) for dim, size in enumerate(shape) if size % 2 == 0]
    return found


SAME = {
    "neg": lambda x: ~x if x.dtype is torch.bool else -x,
    "add": lambda x: x | x if x.dtype is torch.bool else x + x,
    "clone": torch.clone,
    "zeros_like": torch.zeros_like,
    "equal to itself": lambda x: x == x,
    "to f64": lambda x: x.to(torch.float64),
    "in place": lambda x: x.clone().copy_(x),
}
REDUCED = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


def every_case(world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    seen = {(case.shape, case.dtype): case for case in cases(world_size=world_size)}
    for seed, case in enumerate(seen.values()):
        tensor = case.tensor()
        for placement in placements(case.shape, world_size, seed):
            what = f"{case} {placement}"
            x = distribute_tensor(tensor, mesh, [placement])
            assert_bitwise(x.full_tensor(), tensor, what)
            with CommLog() as log, ragged_shard.strict():
                results = {name: function(x) for name, function in SAME.items()}
            log.assert_counts({})
            for name, result in results.items():
                assert result.placements == (placement,), (what, name)
                assert_bitwise(result.full_tensor(), SAME[name](tensor), f"{what} {name}")
            for name, function in REDUCED.items():
                if tensor.numel() == 0 or isinstance(placement, InterleavedShard):
                    continue  # torch refuses, or gathers where ranks hold nothing
                if tensor.dtype is torch.bool and name != "sum":
                    continue  # gloo does not reduce booleans
                with ragged_shard.strict():
                    result = function(x).full_tensor()
                assert_bitwise(result, function(tensor), f"{what} {name}")
            for target in (Replicate(), *(Shard(dim) for dim in range(len(case.shape)))):
                moved = x.redistribute(placements=[target])
                native = distribute_tensor(tensor, mesh, [target], src_data_rank=None)
                assert_bitwise(moved.to_local(), native.to_local(), f"{what} -> {target}")
                back = moved.redistribute(placements=[placement])
                assert_bitwise(back.to_local(), x.to_local(), f"{target} -> {what}")
    assert dist.get_world_size() == world_size


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_shape_and_dtype_of_the_case_table(world_size):
    run_ranks(every_case, world_size, world_size, timeout=240)
