"""Entries that a plan accepts, and those that it refuses."""

import pytest
from torch.distributed.tensor import Replicate, Shard

from plan_api import Phase, Plan
from testkit import fake_mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def test_axes_are_names_numbers_several_or_a_sub_mesh(mesh):
    plan = Plan(mesh)
    for axes in ("tp", 1, ("tp",), mesh["tp"]):
        plan.shard("w", S0, axes)
    assert {entry.axes for entry in plan.entries} == {("tp",)}
    plan = Plan(mesh).shard("w", (S0, R)).shard("w", (R, S1), ("tp", "dp")).shard("w", [R, R], mesh)
    assert [entry.axes for entry in plan.entries] == [("dp", "tp"), ("tp", "dp"), ("dp", "tp")]


def test_a_mesh_without_names_has_numbers():
    with fake_mesh((2,)) as mesh:
        plan = Plan(mesh).shard("w", S0).shard("w", S0, 0).shard("w", S0, "0")
        assert {entry.axes for entry in plan.entries} == {("0",)}


@pytest.mark.parametrize(
    ("placements", "axes", "message"),
    [
        (S0, "tpp", r"axes \('dp', 'tp'\), not 'tpp' \(did you mean 'tp'\?\)"),
        (S0, 2, r"not 2$"),
        ((S0, S0), ("tp", 1), "name one axis twice"),
        (S0, None, "1 placements for 2 axes"),
        ((S0, R), "tp", "2 placements for 1 axes"),
        ("S(0)", "tp", r"expected a placement .*, got 'S\(0\)'$"),
        (0, "tp", r"got 0; did you mean Shard\(0\)\?"),
        (None, "tp", r"got None; did you mean Replicate\(\)\?"),
        ((R, 1), ("dp", "tp"), r"got 1; did you mean Shard\(1\)\?"),
        (Shard(-1), "tp", "count dims from the front"),
    ],
)
def test_invalid_entries_are_refused(mesh, placements, axes, message):
    with pytest.raises(ValueError, match=message):
        Plan(mesh).shard("w", placements, axes)


def test_a_submesh_of_another_mesh_is_refused(mesh):
    from torch.distributed.device_mesh import init_device_mesh

    other = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with pytest.raises(ValueError, match="meshes without a common root"):
        Plan(mesh).shard("w", S0, other)


def test_parameters_are_sharded_and_activations_redistributed(mesh):
    plan = Plan(mesh)
    with pytest.raises(ValueError, match=r"redistribute\('w.grad'\).*annotate\(\) says"):
        plan.redistribute("w.grad", R, S0, "tp")
    with pytest.raises(ValueError, match=r"redistribute\('m.<in>'\): src: .*got None; shard\(\)"):
        plan.redistribute("m.<in>", None, S0, "tp")
    with pytest.raises(ValueError, match=r"shard\('m.<op:dropout>'\).*annotate\(\) says"):
        plan.shard("m.<op:dropout>", S0, "tp")
    with pytest.raises(ValueError, match=r"annotate\('w'\).*as in 'w.grad'"):
        plan.annotate("w", S0, "tp")
    plan.redistribute("m.<in>", R, S0, "tp", grad_dst=R).annotate("w.grad", S0, "tp")
    assert [entry.src for entry in plan.entries] == [(R,), None]
    assert plan.entries[0].grad_dst == (R,)


def test_entries_print_their_arguments_and_source_lines(mesh):
    plan = Plan(mesh).shard("w", S0, "tp", Phase.INIT).shard("m.<in>", (R, S0))
    assert str(plan) == (
        "shard('w', tp=Shard(dim=0), phase=INIT)\nshard('m.<in>', dp=Replicate(), tp=Shard(dim=0))"
    ).replace("Shard(dim=0)", str(S0)).replace("Replicate()", str(R))
    assert all(entry.line.startswith("test_plan.py:") for entry in plan.entries)


def test_plans_are_joined_and_nested_under_a_module(mesh):
    inner = Plan(mesh).shard("w", S0, "tp").shard("<in>", R, "tp")
    joined = Plan(mesh, cover=True).shard("v", S0, "tp") | inner.under("encoder.0")
    assert joined.cover
    assert [entry.path.text for entry in joined.entries] == ["v", "encoder.0.w", "encoder.0.<in>"]
    assert joined.entries[1].path.matches("encoder.0.w")
    assert not joined.entries[1].path.matches("encoderx0.w")
    assert joined.entries[2].path.matches("encoder.0")
    assert len(inner.entries) == 2


def test_plans_on_two_meshes_do_not_join(mesh):
    from torch.distributed.device_mesh import init_device_mesh

    with pytest.raises(ValueError, match="cannot be joined: one tensor cannot be on both"):
        Plan(mesh) | Plan(init_device_mesh("cpu", (4,)))
