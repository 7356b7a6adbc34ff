"""Muon on rows that tensor parallelism shards, interleaved ones included: one device's bits."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import Muon
from fsdp.optim.matrix.assignment import assign_owners
from fsdp.optim.matrix.exchange import compute_on_owners
from fsdp.optim.matrix.matrices import matrices_of
from fsdp.optim.matrix.split import ShardedRows, matrix_rows, shard_rows
from fsdp.optim.muon.newton_schulz import newton_schulz_cost
from ragged_shard import InterleavedShard
from testkit import run_ranks
from testkit.models.matrix_net import full_tensor


@dataclass(frozen=True)
class Case:
    """A parameter, its placement over tp, its split, and the number of matrices on a tp rank."""

    shape: tuple[int, ...]
    placement: object
    split: object
    matrices: int


QKV = InterleavedShard(0, 3)
CASES = {
    "fused qkv as one matrix": Case((12, 5), QKV, None, 1),
    "projections of a fused qkv": Case((12, 5), QKV, 3, 3),
    "unequal projections of interleaved chunks": Case((12, 5), QKV, (8, 4), 2),
    "heads of a fused qkv": Case((12, 5), QKV, 6, 3),
    "heads of the first projection only": Case((12, 5), QKV, (2, 2, 4, 4), 3),
    "heads that tp shards": Case((12, 5), Shard(0), 6, 3),
    "rows of interleaved columns": Case((6, 8), InterleavedShard(1, 2), 2, 2),
    "gate and up of stacked experts": Case((3, 8, 5), InterleavedShard(1, 2), 2, 6),
}


def matrix_values(tensor, split):
    """Returns the matrices of a full tensor, each as a tensor of its own."""
    entries = list(tensor) if tensor.ndim == 3 else [tensor]
    rows = tensor.shape[-2]
    sizes = (rows,) if split is None else [rows // split] * split if type(split) is int else split
    return [one.clone() for entry in entries for one in entry.split(list(sizes))]


def step_both(param, optimizer, split, steps=3, **options):
    """Steps torch's Muon with the same gradients; returns both parameters as matrices."""
    params = [nn.Parameter(one) for one in matrix_values(full_tensor(param), split)]
    reference = torch.optim.Muon(params, lr=0.1, **options)
    for step in range(steps):
        param.grad = torch.zeros_like(param)
        torch.manual_seed(10 * step + dist.get_rank())
        param.grad.to_local().normal_()
        grads = matrix_values(full_tensor(param.grad), split)
        for one, grad in zip(params, grads, strict=True):
            one.grad = grad
        optimizer.step()
        reference.step()
    return matrix_values(full_tensor(param), split), params


@pytest.mark.ranks
@pytest.mark.parametrize(
    "granularity",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in (Block(1), Whole())), Rows(1)],
    ids=str,
)
def test_rows_that_tp_shards_have_the_bits_of_one_device(granularity):
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name, case in CASES.items():
            model = nn.Module()
            values = torch.randn(case.shape, generator=torch.Generator().manual_seed(0))
            model.w = nn.Parameter(distribute_tensor(values, mesh["tp"], [case.placement]))
            fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda param: granularity)
            optimizer = Muon(model.named_parameters(), lr=0.1, split=case.split)
            got, expected = step_both(model.w, optimizer, case.split)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), name
            assert len(optimizer.owners()) == case.matrices, name

    run_ranks(check, 4)


@pytest.mark.ranks
@pytest.mark.parametrize("split", [None, 4], ids=str)
def test_shards_of_rows_that_tp_shards_have_the_bits_of_one_device(split):
    """As ZeRO-3 of plan-api places parameters: dp divides each of tp's shards."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        values = torch.randn((16, 5), generator=torch.Generator().manual_seed(0))
        local = values.view(2, 2, 4, 5)[mesh.get_local_rank("tp"), mesh.get_local_rank("dp")]
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        param = nn.Parameter(DTensor.from_local(local.clone(), mesh, placements))
        assert torch.equal(full_tensor(param.detach()), values)
        optimizer = Muon([("w", param)], lr=0.1, split=split)
        got, expected = step_both(param, optimizer, split)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        # dp's ranks divide the work: each owns some of what a rank of tp has.
        assert len(optimizer.owners()) == (1 if split is None else 2)

    run_ranks(check, 4)


@pytest.mark.ranks
def test_matrices_that_tp_shards_have_one_owner_where_its_ranks_have_other_numbers_of_matrices():
    """3 experts on 2 ranks, and 5 rows: what a rank of tp has differs, what they exchange not."""
    shapes = {"a": (6, 6), "experts": (3, 8, 8), "b": (5, 6), "c": (6, 6), "d": (5, 6)}

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Module()
        for name, shape in shapes.items():
            values = torch.zeros(shape)
            setattr(model, name, nn.Parameter(distribute_tensor(values, mesh["tp"], [Shard(0)])))
        fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda param: Rows(1))
        found = [
            one
            for name, param in model.named_parameters()
            for one in matrices_of(param, matrix_rows(None, param, name, "Muon"), name, "Muon")
        ]
        tasks = assign_owners(found, newton_schulz_cost)
        owners = {one.matrix.name: one.owner for one in tasks if one.matrix.is_inner_sharded}
        return owners, len(found)

    (owners, of_first), (others, of_second), *_ = run_ranks(check, 4)
    assert owners == others
    assert {*owners} == {"a", "b", "c", "d"}
    assert {*owners.values()} == {0, 1}
    assert of_first != of_second


@pytest.mark.ranks
def test_owners_have_the_rows_of_a_matrix_in_its_order():
    """Newton-Schulz commutes with permutations of rows, so sums of the rows above are computed."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name, case in CASES.items():
            model = nn.Module()
            values = torch.randn(case.shape, generator=torch.Generator().manual_seed(0))
            model.w = nn.Parameter(distribute_tensor(values, mesh["tp"], [case.placement]))
            fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda param: Rows(1))
            param, local = model.w, model.w.to_local().detach().view(-1)
            rows = matrix_rows(case.split, param, "w", "Muon")
            tasks = assign_owners(matrices_of(param, rows, "w", "Muon"), newton_schulz_cost)
            result = torch.zeros_like(param)

            def part(task, local=local):
                return local[task.matrix.local_slice]

            def apply(task, part, result=result):
                result.to_local().view(-1)[task.matrix.local_slice] = part

            compute_on_owners(tasks, part, lambda task, m: m.cumsum(0), apply, 30)
            found, wanted = (
                matrix_values(one, case.split) for one in (full_tensor(result), values)
            )
            for one, matrix in zip(found, wanted, strict=True):
                assert torch.equal(one, matrix.cumsum(0)), name

    run_ranks(check, 4)


@pytest.mark.ranks
def test_interleaved_rows_without_fsdp_are_gathered_on_all_ranks():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        values = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
        param = nn.Parameter(distribute_tensor(values, mesh, [QKV]))
        optimizer = Muon([("w", param)], lr=0.1, split=3)
        got, expected = step_both(param, optimizer, 3)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        return optimizer.owners()

    assert run_ranks(check, 2) == [{f"w[{n}]": None for n in range(3)}] * 2


def test_rows_of_a_rank_are_parts_of_matrices_or_whole_ones():
    """As in the docstring; a matrix of two chunks; and rows that fit neither way."""
    part, head = ShardedRows(4, 2, 1), ShardedRows(2, 2, None)
    assert shard_rows((4, 4, 4), 3, 2) == [part] * 3
    assert shard_rows((2, 2, 4, 4), 3, 2) == [head, part, part]
    assert shard_rows((8, 4), 3, 2) == [ShardedRows(8, 4, 2), part]
    assert shard_rows((6, 6), 3, 2) is None  # one and a half chunks
    assert shard_rows((1, 3, 4, 4), 3, 2) is None  # a matrix on two ranks
    assert shard_rows((1, 1, 2, 4, 4), 3, 2) is None  # other matrices on the second rank
    assert shard_rows((3, 3), 2, 2) is None  # chunks of three rows on two ranks
    assert shard_rows((6, 6), 3, 1) == [ShardedRows(6, 6, None)] * 2
