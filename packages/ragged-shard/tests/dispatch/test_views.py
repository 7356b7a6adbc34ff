"""Views of ragged tensors."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import ragged_shard
from ragged_shard import RaggedShard
from testkit import CommLog, assert_bitwise, run_ranks

pytestmark = pytest.mark.ranks

R = Replicate()
ROWS, ELEMENTS = (0,), (0, 1)


PLACEMENTS = [
    RaggedShard(ROWS, (5, 7)),
    RaggedShard(ROWS, (0, 3)),
    RaggedShard(ELEMENTS, (7, 89)),
    RaggedShard(ELEMENTS, (1, 0)),
    RaggedShard.owned_by(1, 2),
]


def operand(dtype=torch.float32):
    return ((torch.arange(96).reshape(12, 8) * 37) % 17 - 8).to(dtype)


def is_ragged(result, placement):
    return result.placements == (placement,)


def views():
    mesh = init_device_mesh("cpu", (2,))
    cases = [
        (RaggedShard(ROWS, (5, 7)), (96,), RaggedShard((0,), (5, 7))),
        (RaggedShard(ROWS, (5, 7)), (12, 2, 4), RaggedShard((0,), (5, 7))),
        (RaggedShard(ROWS, (5, 7)), (24, 4), RaggedShard((0,), (5, 7))),
        (RaggedShard(ROWS, (1, 2)), (3, 4, 8), RaggedShard((0,), (1, 2))),
        (RaggedShard(ROWS, (5, 7)), (3, 4, 8), RaggedShard((0, 1), (5, 7))),
        (RaggedShard(ELEMENTS, (7, 89)), (8, 12), RaggedShard((0, 1), (7, 89))),
        (RaggedShard(ELEMENTS, (1, 2)), (96,), RaggedShard((0,), (1, 2))),
        (RaggedShard(ELEMENTS, (1, 2)), (3, -1), RaggedShard((0,), (1, 2))),
        (RaggedShard.owned_by(0, 2), (4, 24), RaggedShard.owned_by(0, 2)),
    ]
    for placement, shape, expected in cases:
        ragged = distribute_tensor(operand(), mesh, [placement])
        with CommLog() as log, ragged_shard.strict():
            viewed = ragged.view(shape)
            back = viewed.view(12, 8)
        log.assert_counts({})
        assert viewed.placements == (expected,), (placement, shape, viewed.placements)
        assert_bitwise(viewed.full_tensor(), operand().view(shape), f"{placement} {shape}")
        assert_bitwise(back.full_tensor(), operand(), f"{placement} {shape} back")
        viewed.mul_(2)
        assert_bitwise(ragged.full_tensor(), operand() * 2, "the view shares its memory")


def test_views_reinterpret_the_same_storage():
    run_ranks(views, 2)


def views_where_units_are_of_a_longer_base():
    """Their number does not say how long they are in other dims, so the tensor is gathered."""
    mesh = init_device_mesh("cpu", (2,))
    ragged = distribute_tensor(operand(), mesh, [RaggedShard(ROWS, (2, 1), 5)])
    assert ragged.to_local().shape == ((10, 8), (2, 8))[mesh.get_rank()]
    ragged_shard.reset_fallbacks()  # an operator warns once in these processes
    with pytest.warns(ragged_shard.RaggedShardFallbackWarning, match="aten.view"):
        viewed = ragged.view(24, 4)
    assert_bitwise(viewed.full_tensor(), operand().view(24, 4), "view")


def test_views_where_units_are_of_a_longer_base_gather():
    run_ranks(views_where_units_are_of_a_longer_base, 2)


def squeezed_and_expanded():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(operand(), mesh, [PLACEMENTS[0]])
    cases = {
        "unsqueeze": lambda x: x.unsqueeze(1),
        "squeeze": lambda x: x.unsqueeze(-1).squeeze(2),
        "expand": lambda x: x.unsqueeze(1).expand(12, 3, 8),
        "expand kept": lambda x: x.sum(1, keepdim=True).expand(-1, 5),
    }
    for name, function in cases.items():
        with CommLog() as log, ragged_shard.strict():
            result = function(x)
        log.assert_counts({})
        assert is_ragged(result, PLACEMENTS[0]), name
        assert_bitwise(result.full_tensor(), function(operand()), name)


def test_dims_of_one_behind_whole_rows():
    run_ranks(squeezed_and_expanded, 2)
