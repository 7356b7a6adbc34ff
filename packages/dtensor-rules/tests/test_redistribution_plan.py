"""What is planned for a redistribution, and which ones are left to torch."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dtensor_rules import _compat
from dtensor_rules._core import Axis, Chunk, Divide, Redistribution
from dtensor_rules.redistribution import plan_redistribution
from testkit import fake_mesh

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
SUM, AVG, MAX = Partial("sum"), Partial("avg"), Partial("max")


def spec(mesh, placements, tensor, **kwargs):
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return DTensorSpec(mesh, tuple(placements), meta, **kwargs)


def test_a_plan_says_what_it_does():
    with fake_mesh((2, 4), rank=5) as mesh:
        whole = torch.zeros(6, 10)
        plan = plan_redistribution(spec(mesh, (SUM, R), whole), spec(mesh, (R, S1), whole))
        assert repr(plan) == (
            "Redistribution(all_reduce(op=sum, axis=2) -> chunk(dim=1, piece=1 of 4))"
        )
        assert plan.communicates
        plan = plan_redistribution(spec(mesh, (S0, R), whole), spec(mesh, (S1, SUM), whole))
        assert repr(plan) == (
            "Redistribution(divide(4) -> all_to_all_by_gather(dim=0, size=6 to dim=1, size=10, "
            "axis=2))"
        )


def test_a_plan_without_collectives_says_so():
    with fake_mesh((2,)) as mesh:
        whole = torch.zeros(4)
        chunk = plan_redistribution(spec(mesh, (R,), whole), spec(mesh, (S0,), whole))
        assert not chunk.communicates
        nothing = plan_redistribution(spec(mesh, (S0,), whole), spec(mesh, (S0,), whole))
        assert repr(nothing) == "Redistribution()"
        assert nothing.apply(whole) is whole


def test_a_mesh_axis_of_one_rank_needs_nothing():
    with fake_mesh((1, 2)) as mesh:
        whole = torch.zeros(4, 4)
        plan = plan_redistribution(spec(mesh, (SUM, R), whole), spec(mesh, (S0, R), whole))
        assert repr(plan) == "Redistribution()"


def test_no_autograd_is_recorded():
    local = torch.ones(4, requires_grad=True)
    plan = Redistribution([Divide(2), Chunk(Axis(group="", size=2, rank=0), dim=0)])
    assert not plan.apply(local).requires_grad


def test_an_axis_outside_which_the_rank_lies_is_refused():
    with pytest.raises(ValueError, match="rank 4 is outside an axis of 4 ranks"):
        Axis(group="0", size=4, rank=4)


def test_a_cuda_mesh_uses_the_real_all_to_all():
    with fake_mesh((2,), device_type="cuda") as mesh:
        whole = torch.zeros(4, 4)
        plan = plan_redistribution(spec(mesh, (S0,), whole), spec(mesh, (S1,), whole))
        assert repr(plan) == "Redistribution(all_to_all(dim=0, size=4 to dim=1, size=4, axis=2))"


def test_torchs_planner_keeps_nothing():
    with fake_mesh((2,)) as mesh:
        before = (
            len(_redistribute._planner_cache),
            _redistribute._gen_transform_infos.cache_info().currsize,
        )
        for length in range(2, 50):
            whole = torch.zeros(length)
            plan_redistribution(spec(mesh, (S0,), whole), spec(mesh, (R,), whole))
        after = (
            len(_redistribute._planner_cache),
            _redistribute._gen_transform_infos.cache_info().currsize,
        )
        assert after == before


def test_a_local_tensor_that_belies_its_spec_is_noticed():
    with fake_mesh((2,)) as mesh:
        whole = torch.zeros(8)
        src, dst = spec(mesh, (S0,), whole), spec(mesh, (R,), whole)
        if _compat.RELEASE >= (2, 12):  # 2.11 goes on with a tensor of another shape
            with pytest.raises(RuntimeError):
                _redistribute.redistribute_local_tensor(torch.zeros(5), src, dst)
        with pytest.raises(RuntimeError, match="the shards of dim 0 make 10 where the spec says 8"):
            plan_redistribution(src, dst).apply(torch.zeros(5))


@pytest.mark.skipif(_compat.RELEASE < (2, 12), reason="2.11 makes no plan for strided shards")
def test_strided_pieces_that_belie_their_spec_are_noticed():
    with fake_mesh((2,)) as mesh:
        whole = torch.zeros(8)
        src = spec(mesh, (_StridedShard(0, split_factor=2),), whole)
        plan = plan_redistribution(src, spec(mesh, (R,), whole))
        assert plan.apply(torch.zeros(4)).shape == (8,)
        with pytest.raises(RuntimeError, match="the shards of dim 0 make 12 where the spec says 8"):
            plan.apply(torch.zeros(6))


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (2, 6), (4, 2), (4, 1), (4, 3), (6, 2)], ids=str)
@pytest.mark.parametrize(("source", "target"), [(S0, S1), (S1, S0)], ids=str)
def test_of_even_dims_it_asks_no_more_than_torch(source, target, shape):
    """Neither padding nor cutting: a local tensor of another size fares as it does with torch."""

    def outcome(function):
        try:
            return function().shape
        except RuntimeError as error:
            return str(error)

    with fake_mesh((2,)) as mesh:
        whole, local = torch.zeros(4, 4), torch.zeros(shape)
        src, dst = spec(mesh, (source,), whole), spec(mesh, (target,), whole)
        plan = plan_redistribution(src, dst)
        expected = outcome(lambda: _redistribute.redistribute_local_tensor(local, src, dst))
        assert outcome(lambda: plan.apply(local)) == expected


# What is left to torch.


class OtherShard(Shard):
    pass


class OtherSpec(DTensorSpec):
    pass


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (OtherShard(0), R),
        (R, OtherShard(0)),
        (_MaskPartial(offset_shape=torch.Size([4, 4])), R),
        (_StridedShard(0, split_factor=3), R),  # unequal pieces
        (R, Partial("product")),
        (S0, SUM),
        (SUM, MAX),
    ],
    ids=str,
)
def test_what_is_not_plain_is_left_to_torch(source, target):
    with fake_mesh((2,)) as mesh:
        whole = torch.zeros(4, 4)
        src, dst = spec(mesh, (source,), whole), spec(mesh, (target,), whole)
        assert plan_redistribution(src, dst) is None


def test_an_odd_placement_on_an_axis_that_stays_is_left_to_torch():
    with fake_mesh((2, 2)) as mesh:
        whole = torch.zeros(4, 4)
        src, dst = spec(mesh, (OtherShard(0), S1), whole), spec(mesh, (OtherShard(0), R), whole)
        assert plan_redistribution(src, dst) is None


def test_a_subclass_of_specs_is_left_to_torch():
    with fake_mesh((2,)) as mesh:
        whole = torch.zeros(4)
        plain = spec(mesh, (R,), whole)
        other = OtherSpec(mesh, (S0,), plain.tensor_meta)
        assert plan_redistribution(plain, other) is None
        assert plan_redistribution(other, plain) is None


def test_a_spec_without_shape_is_left_to_torch():
    with fake_mesh((2,)) as mesh:
        assert plan_redistribution(DTensorSpec(mesh, (R,)), DTensorSpec(mesh, (S0,))) is None


def test_another_mesh_is_left_to_torch():
    with fake_mesh((2, 2)) as mesh:
        whole = torch.zeros(4)
        flat = DeviceMesh("cpu", torch.arange(4))
        src, dst = spec(mesh, (R, R), whole), spec(flat, (S0,), whole)
        assert plan_redistribution(src, dst) is None


def test_a_rank_outside_the_mesh_is_left_to_torch():
    with fake_mesh((4,), rank=3):
        mesh = DeviceMesh("cpu", [0, 1])
        whole = torch.zeros(4)
        assert plan_redistribution(spec(mesh, (R,), whole), spec(mesh, (S0,), whole)) is None


def test_symbolic_sizes_are_left_to_torch():
    with fake_mesh((2,)) as mesh:
        fake = FakeTensorMode(shape_env=ShapeEnv())
        whole = fake.from_tensor(torch.zeros(6, 4), static_shapes=False)
        assert isinstance(whole.shape[0], torch.SymInt)
        assert plan_redistribution(spec(mesh, (R,), whole), spec(mesh, (S0,), whole)) is None


def test_tracing_is_left_to_torch():
    with fake_mesh((2,)) as mesh, FakeTensorMode():
        whole = torch.zeros(6, 4)
        assert plan_redistribution(spec(mesh, (R,), whole), spec(mesh, (S0,), whole)) is None
