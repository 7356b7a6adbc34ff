"""SOAP on matrices that tensor and expert parallelism shard: blocks are those of one device."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import SOAP
from fsdp.optim.tensors import local_of
from ragged_shard import InterleavedShard
from testkit import CommLog, run_ranks
from testkit.checkpoints import load_checkpoint, save_checkpoint
from testkit.models.matrix_net import MatrixMlp, full_tensor, full_tensors, optimizer_of
from testkit.models.reference_soap import ReferenceSoap

OPTIONS = {"lr": 0.1, "block_size": 3, "precondition_frequency": 2}
NAMES_IN_REFERENCE = {
    "left": "left", "right": "right", "left_basis": "left_basis", "right_basis": "right_basis",
    "exp_avg": "mean", "exp_avg_sq": "squares",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A parameter, its placement over tp, its split, and what its state is expected to be.

    Attributes:
        strips: number of strips on a tp rank.
        copies: how often the ranks have the state of one device: twice if both tp ranks have it,
            once if each has matrices of its own; None if some are and some are not.
    """

    shape: tuple[int, ...]
    placement: object
    split: object
    strips: int
    copies: int | None


QKV = InterleavedShard(0, 3)
CASES = {
    # Blocks of 3 rows: the second begins on one rank and ends on the other.
    "rows": Case((8, 5), Shard(0), None, 1, 2),
    "columns": Case((8, 10), Shard(1), None, 3, 2),
    "replicated": Case((8, 5), Replicate(), None, 3, 2),
    "fused qkv as one matrix": Case((12, 5), QKV, None, 1, 2),
    "projections of a fused qkv": Case((12, 5), QKV, 3, 3, 2),
    "heads of a fused qkv": Case((12, 5), QKV, 6, 3, 1),
    "heads of the first projection only": Case((12, 5), QKV, (2, 2, 4, 4), 3, None),
    "rows of interleaved columns": Case((8, 8), InterleavedShard(1, 2), 2, 4, 2),
    "experts": Case((4, 5, 6), Shard(0), None, 4, 1),
    "rows of experts": Case((4, 8, 5), Shard(1), None, 4, 2),
    "columns of experts": Case((3, 5, 6), Shard(2), None, 6, 2),
}


def matrices(tensor, split):
    """Returns the matrices of a full tensor, each as a tensor of its own."""
    entries, rows = list(tensor) if tensor.ndim == 3 else [tensor], tensor.shape[-2]
    sizes = (rows,) if split is None else [rows // split] * split if type(split) is int else split
    return [one.clone() for entry in entries for one in entry.split(list(sizes))]


def step_both(param, optimizer, split, steps=4):
    """Steps a reference with the same gradients; returns it and its parameters."""
    params = [nn.Parameter(one) for one in matrices(full_tensor(param), split)]
    reference = ReferenceSoap(params, **OPTIONS)
    for step in range(steps):
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
        param.grad = placed_like(param, values)
        for one, grad in zip(params, matrices(values, split), strict=True):
            one.grad = grad
        optimizer.step()
        reference.step()
    return reference, params


def placed_like(param, values):
    if not hasattr(param, "placements"):
        return values
    return distribute_tensor(values, param.device_mesh, [Replicate()] * param.device_mesh.ndim
                             ).redistribute(placements=param.placements)  # fmt: skip


def state_of(optimizer, param):
    return {
        key: full_tensor(value) for key, value in optimizer.state[param].items() if key != "step"
    }


def state_of_reference(reference):
    """Returns the state of all blocks by fsdp's names."""
    return {
        f"{name}.{n}": getattr(block, own)
        for n, block in enumerate(reference._blocks.values())
        for name, own in NAMES_IN_REFERENCE.items()
    }


def check_case(case, name, param, optimizer):
    reference, params = step_both(param, optimizer, case.split)
    found = matrices(full_tensor(param), case.split)
    assert all(map(torch.equal, found, params)), name
    if case.copies == 2:  # block n of any product is block n of one device
        expected = state_of_reference(reference)
        state = state_of(optimizer, param)
        assert state.keys() == expected.keys(), name
        assert all(torch.equal(state[key], expected[key]) for key in expected), name
    local = sum(local_of(v).nbytes for k, v in optimizer.state[param].items() if k != "step")
    return local, reference.state_bytes


@pytest.mark.ranks
@pytest.mark.parametrize(
    "granularity",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in (Block(1), Whole())), Rows(1)],
    ids=str,
)
def test_matrices_that_tp_and_ep_shard_have_the_bits_and_state_of_one_device(granularity):
    def check():
        mesh, nbytes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), {}
        for name, case in CASES.items():
            model = nn.Module()
            values = torch.randn(case.shape, generator=torch.Generator().manual_seed(9))
            model.w = nn.Parameter(distribute_tensor(values, mesh["tp"], [case.placement]))
            fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda param: granularity)
            optimizer = SOAP(model.named_parameters(), split=case.split, **OPTIONS)
            nbytes[name] = check_case(case, name, model.w, optimizer)
            assert len(optimizer.owners()) == case.strips, name
        return nbytes

    found = run_ranks(check, 4)
    for name, case in CASES.items():
        if case.copies is not None:
            total, of_one = sum(each[name][0] for each in found), found[0][name][1]
            assert total == case.copies * of_one, name


WITH_DATA_PARALLELISM = (("dp", "tp"), ("replicate", "shard", "tp"))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names",
    [("tp",), *(pytest.param(one, marks=pytest.mark.slow) for one in WITH_DATA_PARALLELISM)],
    ids="-".join,
)
def test_tp_without_fsdp_beside_data_parallelism_and_in_hsdp(names):
    """Rows on a mesh of tp alone are exchanged over tp, whose ranks are then the owners."""

    def check():
        sizes = {"tp": 2, "dp": 2, "replicate": 2, "shard": 1}
        mesh = init_device_mesh("cpu", tuple(map(sizes.get, names)), mesh_dim_names=names)
        for name, case in CASES.items():
            values = torch.randn(case.shape, generator=torch.Generator().manual_seed(9))
            model = nn.Module()
            if "shard" in names:
                model.w = nn.Parameter(distribute_tensor(values, mesh["tp"], [case.placement]))
                fully_shard(model, mesh=mesh["replicate", "shard"])
            else:
                placements = [Replicate()] * (mesh.ndim - 1) + [case.placement]
                model.w = nn.Parameter(distribute_tensor(values, mesh, placements))
            optimizer = SOAP(model.named_parameters(), split=case.split, **OPTIONS)
            try:
                check_case(case, name, model.w, optimizer)
            except ValueError as error:
                raise AssertionError(name) from error

    run_ranks(check, 2 if len(names) == 1 else 4)


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
        optimizer = SOAP([("w", param)], split=split, **OPTIONS)
        # With split each rank of tp has two of the four matrices, of two strips each.
        strips, copies = (1, 2) if split is None else (4, 1)
        case = Case((16, 5), placements, split, strips, copies)
        found = check_case(case, "zero3", param, optimizer)
        assert len(optimizer.owners()) == strips
        return found

    found = run_ranks(check, 4)
    assert sum(local for local, _ in found) == (2 if split is None else 1) * found[0][1]


@pytest.mark.ranks
def test_a_step_gathers_and_returns_a_matrix_once_over_each_axis():
    """Over dp as without tp, and over tp each of two ranks receives the other's half."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Module()
        model.w = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh["tp"], [Shard(0)]))
        fully_shard(model, mesh=mesh["dp"])
        optimizer = SOAP(model.named_parameters(), **OPTIONS)
        model.w.grad = torch.ones_like(model.w)
        optimizer.step()
        with CommLog() as log:
            optimizer.step()
        owner = mesh.get_local_rank("dp") == optimizer.owners()["w"]
        over_dp = {"all_reduce": 1, "all_to_all": 2}
        log.assert_counts(over_dp | ({"all_gather": 1} if owner else {}))

    run_ranks(check, 4)


def mlp(mesh):
    """Returns `MatrixMlp` on tp and dp, as far as the mesh has these axes."""
    model, names = MatrixMlp(), mesh.mesh_dim_names
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "dp" in names:
        fully_shard(model, mesh=mesh["dp"])
    return model


def steps(model, optimizer, numbers):
    for step in numbers:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = placed_like(param, torch.randn(param.shape, generator=generator))
        optimizer.step()
        optimizer.zero_grad()
    return full_tensors(model)


@pytest.mark.ranks
@pytest.mark.slow
def test_checkpoints_load_at_other_products(tmp_path):
    """Of FSDP x TP by TP, by FSDP and by one device, and one device's by FSDP x TP."""
    options = {"block_size": 3, "precondition_frequency": 3}

    def made(shape, names):
        model = mlp(init_device_mesh("cpu", shape, mesh_dim_names=names))
        return model, optimizer_of(SOAP, model, **options)

    def save(folder, shape, names):
        model, optimizer = made(shape, names)
        steps(model, optimizer, range(5))
        save_checkpoint(folder, model, optimizer)
        return steps(model, optimizer, range(5, 10))

    def load(folder, shape, names):
        model, optimizer = made(shape, names)
        load_checkpoint(folder, model, optimizer)
        return steps(model, optimizer, range(5, 10))

    one, both = ((1,), ("one",)), ((2, 2), ("dp", "tp"))
    [alone] = run_ranks(save, 1, tmp_path / "one", *one)
    products = [run_ranks(save, 4, tmp_path / "four", *both)[0]]
    products += [run_ranks(load, 4, tmp_path / "one", *both)[0]]
    products += [run_ranks(load, 2, tmp_path / "four", (2,), (name,))[0] for name in ("tp", "dp")]
    products += run_ranks(load, 1, tmp_path / "four", *one)
    for found in products:
        assert all(torch.equal(found[name], alone[name]) for name in alone)


@pytest.mark.ranks
def test_a_block_that_is_not_finite_is_named_by_its_rows_and_columns():
    """On both tp ranks of the owner, which compute the same."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        value = torch.zeros(6, 8)
        param = nn.Parameter(distribute_tensor(value, mesh, [Shard(1)]))
        rows = nn.Parameter(distribute_tensor(torch.zeros(12, 5), mesh, [QKV]))
        optimizer = SOAP([("columns", param), ("rows", rows)], weight_decay=0.0, **OPTIONS)
        for bad in (False, False, True):
            generator = torch.Generator().manual_seed(int(bad))
            grads = [torch.randn(each.shape, generator=generator) for each in (param, rows)]
            if bad:
                grads[0][4, 7] = grads[1][6, 0] = torch.nan
            param.grad, rows.grad = map(placed_like, (param, rows), grads)
            before = copy.deepcopy([full_tensor(param), full_tensor(rows)])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
        changed = [full_tensor(a) != b for a, b in zip((param, rows), before, strict=True)]
        return [str(one.message) for one in caught], changed

    for caught, (columns, rows) in run_ranks(check, 2):
        assert "'columns[3:6]', columns 6 to 7" in caught[0]
        assert "'rows', rows 6 to 8, columns 0 to 2" in caught[1]
        for changed, skipped in (columns, columns[3:6, 6:]), (rows, rows[6:9, :3]):
            assert not skipped.any()
            assert changed.sum() == changed.numel() - skipped.numel()
