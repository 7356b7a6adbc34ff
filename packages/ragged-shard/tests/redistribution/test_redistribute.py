"""Moving between placements on real ranks: the values, what travels, gradients, and async."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    _redistribute,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from testkit import CommLog, assert_bitwise, run_ranks

pytestmark = pytest.mark.ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ROWS, ELEMENTS = (0,), (0, 1)


def one_axis(world_size):
    """Placements of a (12, 8) tensor on one axis, of this package and of torch."""
    pad = (0,) * (world_size - 2)
    return [
        R,
        S0,
        S1,
        RaggedShard(ROWS, (1,) * world_size),
        RaggedShard(ROWS, (5, 7, *pad)),
        RaggedShard(ROWS, (0, 3, *pad)),
        RaggedShard(ELEMENTS, (7, 89, *pad)),
        RaggedShard(ELEMENTS, (*pad, 31, 1)),
        RaggedShard.owned_by(world_size - 1, world_size),
        InterleavedShard(0, 3),
        InterleavedShard(1, 2),
        InterleavedShard(0, 1, unit=4),
        InterleavedShard(0, 2, unit=2),
    ]


def whole(shape=(12, 8), dtype=torch.float32):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype)


def fewest_elements(size, source, target, shape=(12, 8)):
    """What all ranks together must receive: what each needs and does not have."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return sum(
        len(set(local(numbers, target, rank, size)) - set(local(numbers, source, rank, size)))
        for rank in range(size)
    )


def local(numbers, placement, rank, size):
    """The elements of a rank's local tensor, independently of the package's own arithmetic."""
    if isinstance(placement, RaggedShard):
        per_unit = numbers.numel() // sum(placement.local_units)
        start = per_unit * sum(placement.local_units[:rank])
        stop = start + per_unit * placement.local_units[rank]
        return numbers.flatten()[start:stop].tolist()
    if isinstance(placement, InterleavedShard):
        chunks = numbers.chunk(placement.interleaves, placement.dim)
        parts = [units_of(chunk, placement, rank, size) for chunk in chunks]
        return torch.cat(parts, placement.dim).flatten().tolist()
    if isinstance(placement, Shard):
        return numbers.tensor_split(size, placement.dim)[rank].flatten().tolist()
    return numbers.flatten().tolist()


def units_of(chunk, placement, rank, size):
    dim = placement.dim
    parts = chunk.unflatten(dim, (-1, placement.unit)).chunk(size, dim)
    return (parts[rank] if rank < len(parts) else parts[0].narrow(dim, 0, 0)).flatten(dim, dim + 1)


def every_pair():
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    tensor = whole()
    for source, target in itertools.product(one_axis(world_size), repeat=2):
        placed = distribute_tensor(tensor, mesh, [source])
        expected = local(tensor, source, mesh.get_rank(), world_size)
        assert placed.to_local().flatten().tolist() == expected, source
        with CommLog() as log:
            moved = placed.redistribute(placements=[target])
        assert moved.placements == (target,)
        expected = local(tensor, target, mesh.get_rank(), world_size)
        assert moved.to_local().flatten().tolist() == expected, (source, target)
        assert not isinstance(moved.to_local(), AsyncCollectiveTensor)
        assert_bitwise(moved.full_tensor(), tensor, f"{source} -> {target}")
        if any(isinstance(p, RaggedShard | InterleavedShard) for p in (source, target)):
            sent = torch.tensor(log.wire_bytes() // tensor.element_size())
            dist.all_reduce(sent)
            assert int(sent) == fewest_elements(world_size, source, target), (
                source,
                target,
                log.calls,
            )
            assert len(log.calls) <= 1, log.calls
            if getattr(source, "owner", None) is not None and target == R:
                log.assert_counts({"broadcast": 1})  # no copy per receiver
            if isinstance(source, RaggedShard) and isinstance(target, RaggedShard) and not sent:
                log.assert_counts({})


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_pair_of_placements_sends_the_fewest_bytes_in_one_collective(world_size):
    run_ranks(every_pair, world_size)


def sums_to_pieces(op):
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(dist.get_rank())
    mine = torch.randint(-8, 9, (12, 8)).float()
    partial = DTensor.from_local(mine, mesh, [Partial(op)])
    expected = torch.empty_like(mine).copy_(mine)
    dist.all_reduce(expected, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX,
                               "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.SUM}[op])  # fmt: skip
    if op == "avg":
        expected /= world_size
    for target in one_axis(world_size)[3:]:
        with CommLog() as log:
            reduced = partial.redistribute(placements=[target])
        assert_bitwise(reduced.full_tensor(), expected, f"{op} -> {target}")
        if isinstance(target, RaggedShard) and target.even:
            log.assert_counts({"reduce_scatter": 1})
        assert "all_reduce" not in log.counts(), log.calls
        sent = torch.tensor(log.wire_bytes() // mine.element_size())
        dist.all_reduce(sent)
        assert int(sent) == (world_size - 1) * mine.numel(), (target, log.calls)


@pytest.mark.parametrize(
    ("world_size", "op"),
    [
        (2, "sum"),
        (4, "avg"),
        (2, "max"),
        *(
            pytest.param(world_size, op, marks=pytest.mark.slow)
            for world_size, op in ((2, "avg"), (2, "min"), (4, "sum"), (4, "max"), (4, "min"))
        ),
    ],
)
def test_a_sum_becomes_pieces_by_reduce_scatter(world_size, op):
    run_ranks(sums_to_pieces, world_size, op)


def bases_that_differ():
    """Seven rows on two ranks of an axis are four and three; the other axis shards these."""
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = whole((7, 6))
    placements = [
        (R, R), (S0, S0), (S0, R), (R, S0), (R, S1),
        (StridedRaggedShard(ROWS, (3, 1), 2, 1), S0),
        (StridedRaggedShard(ROWS, (2, 0), 2, 2), S0),
        (StridedRaggedShard(ELEMENTS, (1, 23), 2, 1), S0),
        (StridedRaggedShard(ELEMENTS, (23, 1), 2, 1), S0),
        (S0, RaggedShard(ROWS, (1, 3), 1)),
        (S0, RaggedShard(ELEMENTS, (4, 2), 4)),
        (S0, RaggedShard.owned_by(1, 2)),
        (RaggedShard(ROWS, (3, 4)), S1),
    ]  # fmt: skip
    for source in placements:
        placed = distribute_tensor(tensor, mesh, source)
        assert_bitwise(placed.full_tensor(), tensor, f"{source}")
        for target in placements:
            moved = placed.redistribute(placements=target)
            again = distribute_tensor(tensor, mesh, target)
            assert_bitwise(moved.to_local(), again.to_local(), f"{source} -> {target}")


def test_every_pair_where_another_axis_shards_unevenly():
    run_ranks(bases_that_differ, 4)


def two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    tensor = whole()
    placements = [
        (R, R), (S0, R), (S0, S1), (S1, S0), (R, S0), (S0, S0),
        (RaggedShard(ROWS, (5, 7)), R),
        (R, RaggedShard(ROWS, (5, 7))),
        (RaggedShard(ELEMENTS, (1, 95)), R),
        (RaggedShard(ROWS, (1, 2)), S1),
        (RaggedShard(ELEMENTS, (1, 2)), S1),
        (StridedRaggedShard(ROWS, (1, 5), 2), S0),
        (StridedRaggedShard(ELEMENTS, (5, 1), 2), S0),
        (RaggedShard(ROWS, (1, 5)), S0),
        (S0, RaggedShard(ROWS, (1, 5))),
        (RaggedShard.owned_by(1, 2), S0),
        (RaggedShard(ROWS, (1, 2)), InterleavedShard(0, 3)),
        (R, InterleavedShard(0, 3)),
        (InterleavedShard(1, 2), S0),
        (InterleavedShard(1, 2), InterleavedShard(0, 2)),
    ]  # fmt: skip
    for source in placements:
        placed = distribute_tensor(tensor, mesh, source)
        with CommLog() as log:
            assert_bitwise(placed.full_tensor(), tensor, f"{source}")
        if any(isinstance(p, RaggedShard | InterleavedShard) for p in source):
            assert len(log.calls) == 1, (source, log.calls)  # over both axes at once
        for target in placements:
            moved = placed.redistribute(placements=target)
            assert moved.placements == tuple(target)
            again = distribute_tensor(tensor, mesh, target)
            assert_bitwise(moved.to_local(), again.to_local(), f"{source} -> {target}")


def test_every_pair_on_a_mesh_of_two_axes():
    run_ranks(two_axes, 4)


def axes_that_stay():
    """On three axes: the third stays as it is, or the second, or none."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    tensor = whole((8, 12))
    counts = []
    for flatten in (False, True):
        if flatten:
            mesh["a", "b"]._flatten()
            mesh["a", "c"]._flatten()
        for source, target in [
            ((RaggedShard(ROWS, (1, 3)), S1, R), (R, R, R)),
            ((RaggedShard(ELEMENTS, (1, 3)), S0, S1), (R, R, S1)),
            ((InterleavedShard(0, 2), R, S1), (R, R, R)),
            ((InterleavedShard(0, 2), S1, S1), (R, R, S1)),  # c shards what b shards
            ((S1, S0, RaggedShard(ROWS, (1, 1))), (R, R, RaggedShard(ROWS, (1, 1)))),
        ]:
            placed = distribute_tensor(tensor, mesh, source)
            with CommLog() as log:
                moved = placed.redistribute(placements=target)
            counts.append(len(log.calls))
            expected = distribute_tensor(tensor, mesh, target)
            assert_bitwise(moved.to_local(), expected.to_local(), f"{source} -> {target}")
    return counts


@pytest.mark.slow
def test_axes_that_were_flattened_are_gathered_at_once_beside_others():
    [counts] = {tuple(counts) for counts in run_ranks(axes_that_stay, 8)}
    apart, flat = counts[:5], counts[5:]
    assert flat == (1, 1, 1, apart[3], apart[4])
    assert min(apart) > 1


def gather_not_merged():
    mesh = init_device_mesh("cpu", (2, 2))
    placed = distribute_tensor(whole(), mesh, [RaggedShard(ROWS, (1, 2)), S1])
    with _redistribute.disable_redistribute_transform_optimization(), CommLog() as log:
        assert_bitwise(placed.full_tensor(), whole(), "axis by axis")
    log.assert_counts({"all_to_all": 1, "all_gather": 1})


def test_torch_s_flag_against_merging_is_obeyed():
    run_ranks(gather_not_merged, 4)


def hybrid_gradient():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    mine = whole() + dist.get_rank()
    partial = DTensor.from_local(mine, mesh, [Partial(), Partial()])
    with CommLog() as log:
        reduced = partial.redistribute(placements=[R, RaggedShard(ROWS, (1, 1))])
    log.assert_counts({"reduce_scatter": 1, "all_reduce": 1})
    # The all-reduce carries the shard only: half of the tensor.
    assert log.bytes("all_reduce") == mine.numel() * mine.element_size() // 2
    assert_bitwise(reduced.full_tensor(), 4 * whole() + 6, "hybrid")


def test_a_hybrid_gradient_is_scattered_before_it_is_reduced_across():
    run_ranks(hybrid_gradient, 4)


def sum_beside_a_moving_axis():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    mine = whole().chunk(2)[mesh.get_local_rank(1)].contiguous()
    partial = DTensor.from_local(
        mine, mesh, [Partial(), S0], shape=(12, 8), stride=(8, 1), run_check=False
    )
    with CommLog() as log:
        reduced = partial.redistribute(placements=[RaggedShard(ROWS, (1, 1)), R])
    assert "all_reduce" not in log.counts(), log.calls
    assert log.counts()["reduce_scatter"] == 1
    assert_bitwise(reduced.full_tensor(), 2 * whole(), "sum")


def test_a_sum_stays_one_until_its_axis_is_cut():
    run_ranks(sum_beside_a_moving_axis, 4)


def gradients():
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.linspace(-1, 1, 96).reshape(12, 8)
    for source, target in itertools.product(one_axis(2), repeat=2):
        leaf = distribute_tensor(weight, mesh, [source]).requires_grad_()
        moved = leaf.redistribute(placements=[target])
        (moved.to_local() * 2).sum().backward()
        # On a replicated target every rank's local loss counts.
        assert leaf.grad.placements == (source,)
        assert_bitwise(leaf.grad.full_tensor(), torch.full((12, 8), 2.0), f"{source} {target}")
        full = leaf.redistribute(placements=[target]).full_tensor()
        leaf.grad = None
        (full * weight).sum().backward()
        assert_bitwise(leaf.grad.full_tensor(), weight, f"{source} {target} full")


def test_gradients_come_back_as_the_input_was_placed():
    run_ranks(gradients, 2)


def gradient_of_a_sum():
    mesh = init_device_mesh("cpu", (2,))
    mine = whole().requires_grad_()
    partial = DTensor.from_local(mine, mesh, [Partial()])
    moved = partial.redistribute(placements=[RaggedShard(ROWS, (5, 7))])
    (moved * 3).sum().full_tensor().backward()
    assert_bitwise(mine.grad, torch.full((12, 8), 3.0), "gradient of a partial")
    mine.grad = None
    moved = DTensor.from_local(mine, mesh, [Partial()]).redistribute(placements=moved.placements)
    (moved * moved).sum().full_tensor().backward()  # here the gradient comes back ragged
    assert_bitwise(mine.grad, 4 * whole(), "ragged gradient of a partial")


def test_the_gradient_of_a_sum_is_whole_on_every_rank():
    run_ranks(gradient_of_a_sum, 2)


def waits_later():
    mesh = init_device_mesh("cpu", (2,))
    tensor = whole()
    pairs = [
        (RaggedShard(ROWS, (1, 1)), R),
        (RaggedShard(ROWS, (5, 7)), R),
        (RaggedShard.owned_by(0, 2), R),
        (RaggedShard(ROWS, (5, 7)), RaggedShard(ROWS, (1, 1))),
    ]
    for source, target in pairs:
        moved = distribute_tensor(tensor, mesh, [source]).redistribute(
            placements=[target], async_op=True
        )
        assert isinstance(moved._local_tensor, AsyncCollectiveTensor), (source, target)
        assert_bitwise(moved.full_tensor(), tensor, f"{source} -> {target}")


def test_async_op_returns_before_the_collective_has_ended():
    run_ranks(waits_later, 2)


def flattened():
    """A dim flattened behind another: as torch places it, and as this package does."""
    mesh = init_device_mesh("cpu", (2,))
    tensor = whole()
    for interleaved, strided in (
        (InterleavedShard(0, 3), _StridedShard(0, split_factor=3)),
        (InterleavedShard(1, 2), _StridedShard(1, split_factor=2)),
    ):
        placed = distribute_tensor(tensor, mesh, [interleaved])
        meta = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
        native = DTensor.from_local(placed.to_local(), mesh, [strided], **meta)
        with CommLog() as log:
            there = native.redistribute(placements=[interleaved])
            back = placed.redistribute(placements=[strided])
        log.assert_counts({})
        assert (there.placements, back.placements) == ((interleaved,), (strided,))
        assert_bitwise(there.to_local(), placed.to_local(), f"{strided} -> {interleaved}")
        assert_bitwise(back.to_local(), placed.to_local(), f"{interleaved} -> {strided}")
        with CommLog() as log:
            ragged = native.redistribute(placements=[RaggedShard(ROWS, (5, 7))])
        log.assert_counts({"all_to_all": 1})
        assert_bitwise(ragged.full_tensor(), tensor, f"{strided} -> ragged")


def test_torchs_strided_shard_of_one_axis_is_an_interleaved_one():
    run_ranks(flattened, 2)


def other_dtypes():
    mesh = init_device_mesh("cpu", (2,))
    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.bool):
        tensor = (whole() % 2).to(dtype) if dtype is torch.bool else whole(dtype=dtype)
        placed = distribute_tensor(tensor, mesh, [RaggedShard(ROWS, (5, 7))])
        moved = placed.redistribute(placements=[InterleavedShard(1, 2)])
        assert_bitwise(moved.full_tensor(), tensor, f"{dtype}")
    empty = distribute_tensor(torch.empty(0, 3), mesh, [RaggedShard(ROWS, (5, 7))])
    assert empty.full_tensor().shape == (0, 3)
    scalar = distribute_tensor(torch.tensor(3.0), mesh, [RaggedShard.owned_by(1, 2)])
    assert scalar.full_tensor() == 3.0
    assert scalar.to_local().shape == (() if dist.get_rank() == 1 else (0,))


def test_other_dtypes_empty_tensors_and_scalars():
    run_ranks(other_dtypes, 2)


def source_of_truth():
    mesh = init_device_mesh("cpu", (2,))
    mine = whole() + 1000 * dist.get_rank()
    for placement in one_axis(2)[3:]:
        with CommLog() as log:
            from_first = distribute_tensor(mine, mesh, [placement])
        assert set(log.counts()) <= {"all_to_all"}, log.calls
        assert_bitwise(from_first.full_tensor(), whole(), f"{placement}")
        with CommLog() as log:
            own = distribute_tensor(mine, mesh, [placement], src_data_rank=None)
        log.assert_counts({})
        expected = local(mine, placement, dist.get_rank(), 2)
        assert own.to_local().flatten().tolist() == expected
        before = own.to_local().clone()
        mine.add_(1)
        assert_bitwise(own.to_local(), before, "the tensor's memory is not shared")
        mine.sub_(1)
    mesh = init_device_mesh("cpu", (1, 2))
    placements = [R, RaggedShard.owned_by(dist.get_world_size() - 1, 2)]
    own = distribute_tensor(mine, mesh, placements, src_data_rank=None)
    before = own.to_local().clone()
    mine.add_(1)
    assert_bitwise(own.to_local(), before, "nor on two axes, where one rank holds all of it")


def test_distribute_tensor_takes_the_first_ranks_data_or_each_ranks_own():
    run_ranks(source_of_truth, 2)
