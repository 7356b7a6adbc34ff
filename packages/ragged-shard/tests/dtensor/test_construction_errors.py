"""What does not fit raises before anything is sent, and names the value."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from testkit import CommLog, fake_mesh

ROWS = (0,)

ONE_AXIS = {
    "units that do not divide": (
        RaggedShard(ROWS, (3, 2)),
        "a number of units that divides 8, the elements",
    ),
    "too few units": (RaggedShard(ROWS, (8,)), "each of the 2 ranks of the mesh axis, got 1"),
    "too many units": (RaggedShard(ROWS, (1, 1, 2)), "each of the 2 ranks of the mesh axis, got 3"),
    "dims that do not exist": (
        RaggedShard((0, 1, 2), (1, 1)),
        r"expected dims of the tensor, .* got \(0, 1, 2\)",
    ),
    "an owner of another axis": (
        RaggedShard.owned_by(3, 4),
        "each of the 2 ranks of the mesh axis, got 4",
    ),
    "chunks that do not divide": (InterleavedShard(0, 3), "divides 8, the size of dim 0, got 3"),
    "an interleaved dim too many": (InterleavedShard(2, 2), r"whose shape is \(8, 4\), got 2"),
    "a split factor without an inner axis": (
        StridedRaggedShard(ROWS, (1, 1), 2),
        "expected split_factor=1, .*, got 2",
    ),
}


@pytest.mark.parametrize("name", ONE_AXIS)
def test_placements_that_do_not_fit_a_tensor(name):
    placement, message = ONE_AXIS[name]
    tensor = torch.ones(8, 4)
    with fake_mesh((2,)) as mesh, CommLog() as log:
        replica = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        with pytest.raises(ValueError, match=message):
            distribute_tensor(tensor, mesh, [placement])
        with pytest.raises(ValueError, match=message):
            replica.redistribute(placements=[placement])
        with pytest.raises(ValueError, match=message):
            DTensor.from_local(tensor, mesh, [placement], shape=(8, 4), stride=(4, 1))
    log.assert_counts({})


TWO_AXES = {
    "two ragged axes": ([RaggedShard(ROWS, (1, 1))] * 2, r"at most one ragged axis, got \[0, 1\]"),
    "a wrong split factor": (
        [StridedRaggedShard(ROWS, (1, 1), 4), Shard(0)],
        "expected split_factor=2, the number of shards of dim 0 on the axes after it, got 4",
    ),
    "units of the whole tensor": (
        [StridedRaggedShard(ROWS, (3, 5), 2), Shard(0)],
        "a number of units that divides 4, the elements",
    ),
    "an interleaved dim sharded twice": (
        [InterleavedShard(0, 2), Shard(0)],
        "expected an interleaved dim that no other axis shards, got dim 0",
    ),
}


@pytest.mark.parametrize("name", TWO_AXES)
def test_placements_that_do_not_go_together(name):
    placements, message = TWO_AXES[name]
    with (
        fake_mesh((2, 2)) as mesh,
        CommLog() as log,
        pytest.raises(ValueError, match=message),
    ):
        distribute_tensor(torch.ones(8, 4), mesh, placements)
    log.assert_counts({})


def test_too_few_placements():
    with (
        fake_mesh((2, 2)) as mesh,
        pytest.raises(ValueError, match=r"each of the 2 axes of mesh \(2, 2\), got 1"),
    ):
        distribute_tensor(torch.ones(8, 4), mesh, [RaggedShard(ROWS, (1, 1))])


def test_a_tensor_that_is_not_contiguous():
    with fake_mesh((2,)) as mesh:
        with pytest.raises(ValueError, match=r"strides \(1, 4\).*call \.contiguous\(\)"):
            distribute_tensor(torch.ones(8, 4).t(), mesh, [RaggedShard(ROWS, (1, 1))])
        local = torch.ones(4, 4).t()
        with pytest.raises(ValueError, match="expected a contiguous local tensor"):
            DTensor.from_local(
                local, mesh, [RaggedShard(ROWS, (1, 1))], shape=(8, 4), stride=(4, 1)
            )


def test_a_local_tensor_alone_does_not_tell_the_shape():
    with fake_mesh((2,)) as mesh, pytest.raises(ValueError, match="expected shape= and stride="):
        DTensor.from_local(torch.ones(4, 4), mesh, [RaggedShard(ROWS, (1, 1))])


def test_a_rank_outside_the_mesh():
    with fake_mesh((4,)) as world:
        from torch.distributed.device_mesh import DeviceMesh

        others = DeviceMesh("cpu", [2, 3], _init_backend=False)
        assert world.get_rank() == 0
        with pytest.raises(ValueError, match=r"expected a rank of the mesh \[2, 3\]"):
            distribute_tensor(torch.ones(8, 4), others, [RaggedShard(ROWS, (1, 1))])


def test_a_shard_does_not_become_a_sum():
    with fake_mesh((2,)) as mesh:
        ragged = distribute_tensor(
            torch.ones(8, 4), mesh, [RaggedShard(ROWS, (1, 1))], src_data_rank=None
        )
        with pytest.raises(RuntimeError, match="Can not redistribute from"):
            ragged.redistribute(placements=[Partial()])


def test_another_mesh():
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    with fake_mesh((2,)) as mesh:
        ragged = distribute_tensor(
            torch.ones(8, 4), mesh, [RaggedShard(ROWS, (1, 1))], src_data_rank=None
        )
        spec = ragged._spec
    with fake_mesh((2, 1)) as other:
        replica = DTensor.from_local(torch.ones(8, 4), other, [Replicate()] * 2, run_check=False)
        with pytest.raises(NotImplementedError, match="expected a target on the same mesh"):
            redistribute_local_tensor(ragged.to_local(), spec, replica._spec)


@pytest.mark.parametrize(
    ("local", "remedy"),
    [
        (torch.ones(12), r"\.view\(3, 4\)"),
        (torch.ones(5, 4), "construct the DTensor by distribute_tensor"),
    ],
    ids=["flat", "of another rank"],
)
def test_a_dtensor_constructed_around_another_local_shape_at_its_first_operator(local, remedy):
    with fake_mesh((2,)) as mesh, CommLog() as log:
        meta = TensorMeta(torch.Size((8, 4)), (4, 1), torch.float32)
        spec = DTensorSpec(mesh, (RaggedShard(ROWS, (3, 5)),), tensor_meta=meta)
        x = DTensor(local, spec, requires_grad=False)
        right = DTensor(torch.ones(3, 4), spec, requires_grad=False)
        for operator in (
            lambda: x * 3,
            lambda: x.sum(1),
            lambda: right.clone().div_(x),
            lambda: torch._foreach_mul([right, x], 3.0),
            lambda: x.redistribute(placements=[Replicate()]),
            lambda: torch.nn.functional.linear(torch.ones(2, 4), x),
        ):
            with pytest.raises(ValueError, match=rf"expected .* \(3, 4\) on .*, got .*{remedy}"):
                operator()
        assert (right * 3).to_local().shape == (3, 4)
    log.assert_counts({})
