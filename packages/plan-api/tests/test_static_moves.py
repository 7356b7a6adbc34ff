"""Local tensors are moved with the bits of `DTensor.redistribute`, and their gradients back."""

from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api.lowering.ir import AxisMove, OpKind, SiteStep
from plan_api.runtime.local_redistribute import local_redistribution
from plan_api.static.mover import StaticMover
from testkit import CommLog, fake_mesh, run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
AVG, MAX, MIN = Partial("avg"), Partial("max"), Partial("min")
SHAPE = (4, 6)

MOVES = [
    *product((P, AVG, MAX, MIN), (R, S0, S1)),
    *product((S0, S1), (R,)),
    *product((R,), (S0, S1)),
    (S0, S1),
    (S1, S0),
]


def _local(placement, rank, size):
    """This rank's part of a tensor placed so; what is replicated is the same on all."""
    torch.manual_seed(3 if placement == R else 3 + rank)
    shape = [*SHAPE]
    if isinstance(placement, Shard):
        shape[placement.dim] //= size
    return torch.randn(shape)


def _mover(mesh, src, dst, grad_src=None, grad_dst=None, axis="x", whole=False):
    moves = {axis: AxisMove(dst, src, grad_dst, grad_src)}
    return StaticMover(
        SiteStep("<in>", 0, OpKind.REDIST, moves, (0,)), mesh, "layer.forward_pre", whole
    )


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4])
def test_moves_have_dtensors_bits_and_collectives(size):
    def check():
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
        found = {}
        for src, dst in MOVES:
            if size == 4 and S1 in (src, dst):
                continue  # 6 cannot be cut into 4
            local = _local(src, mesh.get_rank(), size)
            given = local.clone()
            with CommLog() as log:
                theirs = DTensor.from_local(local, mesh, [src], run_check=False).redistribute(
                    placements=[dst]
                )
            with CommLog() as ours:
                moved = local_redistribution(src, dst, mesh, 0, "x")(local)
            found[src, dst] = (
                torch.equal(moved, theirs._local_tensor),
                moved.stride() == theirs._local_tensor.stride(),
                # gloo's DTensor gathers where there is an all-to-all.
                (isinstance(src, Shard) and isinstance(dst, Shard))
                or [(one.op, one.wire_bytes) for one in ours.calls]
                == [(one.op, one.wire_bytes) for one in log.calls],
                torch.equal(local, given),
                # What is cut is memory of its own: an operator may write into it.
                moved.untyped_storage().data_ptr() != local.untyped_storage().data_ptr(),
            )
        return found

    for found in run_ranks(check, size):
        wrong = {case: facts for case, facts in found.items() if not all(facts)}
        assert wrong == {}
        assert len(found) == (len(MOVES) if size == 2 else 10)


@pytest.mark.ranks
def test_gradients_come_back_as_dtensors_do():
    """Of what is moved to a whole tensor for either kind of work that follows."""
    cases = [
        *((src, dst, dst) for src, dst in MOVES if isinstance(dst, Shard) and src != AVG),
        *((src, R, R) for src in (P, S0, S1)),
        *((src, R, P) for src in (P, R, S0, S1)),
    ]

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        found = {}
        for src, dst, grad in cases:
            local, arrives = _local(src, mesh.get_rank(), 2), _local(grad, mesh.get_rank() + 5, 2)
            theirs = DTensor.from_local(local, mesh, [src], run_check=False).detach()
            theirs.requires_grad_()
            gradient = DTensor.from_local(arrives, mesh, [grad], run_check=False)
            theirs.redistribute(placements=[dst]).backward(gradient)
            # The same tensor back where nothing moved forward: DTensor leaves its gradient Partial.
            expected = theirs.grad.redistribute(placements=[src if isinstance(src, Shard) else R])
            ours = local.clone().requires_grad_()
            _mover(mesh, src, dst, grad_src=grad)(ours).backward(arrives)
            found[src, dst, grad] = torch.equal(ours.grad, expected._local_tensor)
        return found

    for found in run_ranks(check, 2):
        assert [case for case, same in found.items() if not same] == []
        assert len(found) == len(cases)


@pytest.mark.ranks
def test_a_whole_tensor_becomes_a_sum_of_shares_and_its_gradient_stays_whole():
    """A bias beside a product that is Partial; `redistribute` of DTensors offers no such move."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        whole = torch.randn(SHAPE, requires_grad=True)
        arrives = torch.randn(SHAPE)
        share = _mover(mesh, R, P)(whole)
        share.backward(arrives)
        return torch.equal(share, whole / 2), torch.equal(whole.grad, arrives)

    assert run_ranks(check, 2) == [(True, True)] * 2


@pytest.mark.ranks
def test_a_mean_over_ranks_gives_each_its_share_of_the_gradient():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        local = torch.full(SHAPE, 1.0 + mesh.get_rank(), requires_grad=True)
        mean = _mover(mesh, AVG, R)(local)
        mean.backward(torch.full(SHAPE, 3.0))
        cut = torch.full(SHAPE, 1.0 + mesh.get_rank(), requires_grad=True)
        part = _mover(mesh, AVG, S0)(cut)
        part.backward(torch.full((2, 6), 1.0 + mesh.get_rank()))
        rows = [0.5] * 2 + [1.0] * 2
        expected = torch.tensor(rows).unsqueeze(1).expand(SHAPE)
        return (
            bool((mean == 1.5).all()),
            bool((local.grad == 1.5).all()),
            bool((part == 1.5).all()),
            torch.equal(cut.grad, expected),
        )

    assert run_ranks(check, 2) == [(True,) * 4] * 2


@pytest.mark.ranks
def test_several_axes_are_moved_in_dtensors_order():
    """Of a dim that both axes cut, too; a rank of another place would have another part."""
    cases = [
        ([S0, S0], [R, R]), ([R, R], [S0, S0]), ([S0, P], [R, S1]), ([S1, S0], [R, R]),
        ([P, S0], [S1, R]), ([P, P], [S0, S1]), ([P, P], [R, R]), ([P, P], [S0, S0]),
        ([S0, S0], [R, S0]), ([R, S0], [S0, S0]), ([S0, S0], [S1, S0]), ([S0, S0], [S1, S1]),
        ([S0, S1], [S1, S0]), ([S0, S0], [S0, R]), ([S0, S0], [S0, S1]), ([S1, S0], [S0, S0]),
        ([P, S0], [S0, S0]), ([S0, P], [S0, S0]),
    ]  # fmt: skip

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
        wrong = []
        for src, dst in cases:
            # A whole tensor is the same on the ranks along its axis.
            where = zip(mesh.get_coordinate(), src, strict=True)
            torch.manual_seed(sum((at + 1) * 7**n for n, (at, p) in enumerate(where) if p != R))
            shape = [4, 4]
            for one in src:
                if isinstance(one, Shard):
                    shape[one.dim] //= 2
            local = torch.randn(shape)
            moves = {
                axis: AxisMove(dst[at], src[at], grad_src=dst[at], grad_dst=R)
                for at, axis in enumerate("xy")
            }
            mover = StaticMover(SiteStep("<in>", 0, OpKind.REDIST, moves, (0,)), mesh, "site")
            theirs = DTensor.from_local(local, mesh, src, run_check=False)
            theirs = theirs.redistribute(placements=dst)._local_tensor
            if not torch.equal(mover(local), theirs):
                wrong.append((src, dst))
        return wrong

    assert run_ranks(check, 4) == [[]] * 4


@pytest.fixture
def axis():
    with fake_mesh((2,), ("x",)) as mesh:
        yield mesh


@pytest.mark.parametrize(
    ("src", "dst", "becomes"),
    [
        (P, R, (R, R)),
        (P, S0, (S0, R)),
        (R, S1, (S1, R)),
        (S0, S1, (S1, S0)),
        (R, P, (R, R)),
        (S0, S0, (R, R)),
    ],
    ids=str,
)
def test_what_gradients_are_by_default(axis, src, dst, becomes):
    assert _mover(axis, src, dst)._gradient("x", AxisMove(dst, src), src) == becomes


def test_a_mover_that_moves_nothing_is_idle(axis):
    assert _mover(axis, R, R).idle
    assert _mover(axis, S0, S0).idle
    assert not _mover(axis, R, R, grad_src=P, grad_dst=R).idle
    assert not _mover(axis, R, S0).idle


def test_a_gathered_tensors_gradient_has_to_be_said(axis):
    said = r"layer.forward_pre:<in>:0, S\(0\) to R along 'x'.*what its gradient is before"
    with pytest.raises(ValueError, match=said):
        _mover(axis, S0, R)
    with pytest.raises(ValueError, match="say grad_src="):
        _mover(axis, R, R, grad_dst=S0)
    _mover(axis, S0, R, grad_src=R)


def test_a_tensor_that_the_script_gives_is_whole_and_others_have_to_be_said(axis):
    with pytest.raises(ValueError, match=r"to be S\(0\) along 'x'.*redistribute\(path, src, dst\)"):
        _mover(axis, None, S0)
    assert _mover(axis, None, S0, whole=True)(torch.ones(4, 1)).shape == (2, 1)


@pytest.mark.parametrize(
    ("src", "dst"), [(S0, P), (R, AVG), (R, MAX), (P, AVG), (Partial("product"), R)], ids=str
)
def test_moves_that_dtensor_has_not_or_rounds_otherwise_are_refused(axis, src, dst):
    with pytest.raises(ValueError, match=r"cannot move .*use mode='eager'"):
        _mover(axis, src, dst, grad_src=R)


@pytest.mark.parametrize(("src", "dst"), [(R, S0), (P, S0), (S1, S0)], ids=str)
def test_uneven_parts_are_refused_with_site_and_shape(axis, src, dst):
    with pytest.raises(ValueError, match=r"layer.forward_pre:<in>:0 has shape \(3, 2\), and its"):
        _mover(axis, src, dst)(torch.ones(3, 2))


def test_a_dtensor_is_refused_by_its_site(axis):
    given = DTensor.from_local(torch.ones(2, 2), axis, [S0])
    with pytest.raises(ValueError, match=r"layer.forward_pre:<in>:0 is a DTensor"):
        _mover(axis, R, S0)(given)


def test_what_needs_no_gradient_is_moved_without_autograd(axis):
    assert not _mover(axis, R, S0)(torch.ones(4, 2)).requires_grad
    with torch.no_grad():
        moved = _mover(axis, R, S0)(torch.ones(4, 2, requires_grad=True))
    assert moved.grad_fn is None
