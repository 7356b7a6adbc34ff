"""Plain parameters that spmd_types annotates are sharded and trained as by FSDP2."""

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as TorchFSDPParam
from torch.distributed.tensor import Partial, Replicate, Shard

import fsdp
from testkit import fake_mesh, run_ranks
from testkit.models.residual_stack import batch

pytestmark = pytest.mark.filterwarnings("default")  # of spmd_types
IN_FSDP2 = hasattr(TorchFSDPParam, "_resolve_spmd_types_for_storage")  # since torch 2.14
PACKAGES = (torch_fsdp, fsdp) if IN_FSDP2 else (fsdp,)


class Block(nn.Module):
    """A column-parallel matrix, a scale that is R, and a shift that is I along tp."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.weight = nn.Parameter(torch.randn(4, 8))
        torch.manual_seed(7)
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.seen = []

    def forward(self, x):
        self.seen.append([spmd.get_local_type(one) for one in (*self.parameters(), x)])
        with spmd.no_typecheck():
            return (x * self.scale + self.shift) @ self.weight.T


def annotated(mesh, *, with_dp=True):
    tp, dp = (spmd.MeshAxis.of(mesh.get_group(name)) for name in ("tp", "dp"))
    model = Block(mesh.get_local_rank("tp"))
    own = {dp: spmd.R} if with_dp else {}
    for param, kind in zip(model.parameters(), (spmd.S(0), spmd.R, spmd.I), strict=True):
        spmd.assert_type(param, {tp: kind, **own})
    return model


def _mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _train(package, mesh, **dims):
    model = annotated(mesh)
    dims = package.DataParallelMeshDims(**dims)
    package.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        grads = [param.grad.full_tensor() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return grads + [param.full_tensor().detach() for param in model.parameters()]


def _train_by_hand(mesh):
    """As `_train`: gradients are the mean over dp, and of what is R along tp their sum."""
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    model = Block(mesh.get_local_rank("tp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def whole(weight, *others):
        parts = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(parts, weight, group=tp)
        return [torch.cat(parts), *others]

    for step in range(2):
        model(batch(step)).square().mean().backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=dp)
            param.grad /= 2
        dist.all_reduce(model.scale.grad, group=tp)
        grads = whole(*(param.grad for param in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return grads + whole(*(param.detach() for param in model.parameters()))


@pytest.mark.ranks
@pytest.mark.parametrize("axis", ["shard", "replicate"])
def test_annotated_parameters_are_trained_as_by_hand_and_as_by_fsdp2(axis):
    def check():
        mesh = _mesh()
        expected = _train_by_hand(mesh)
        for package in PACKAGES:
            found = _train(package, mesh, **{axis: "dp"})
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)

    run_ranks(check, 4)


@pytest.mark.ranks
def test_unsharded_parameters_have_their_annotation_while_types_are_checked():
    def check():
        from spmd_types import checker

        mesh = _mesh()
        tp, dp = (spmd.MeshAxis.of(mesh.get_group(name)) for name in ("tp", "dp"))
        found = []
        for package in PACKAGES:
            with spmd.set_current_mesh(mesh):
                model = annotated(mesh, with_dp=False)
                dims = package.DataParallelMeshDims(shard="dp")
                package.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
                model(batch(0))  # not checked, not annotated
                model.seen.clear()
                with checker.typecheck("permissive"):
                    x = batch(0)
                    spmd.assert_type(x, {tp: spmd.R, dp: spmd.V})
                    model(x).square().mean().backward()
            assert all(type(param.grad) is type(param.data) for param in model.parameters())
            found.append(model.seen)
        assert all(seen == found[0] for seen in found)
        assert found[0][0][1] == {tp: spmd.R, dp: spmd.R}

    run_ranks(check, 4)


@pytest.mark.ranks
def test_inputs_with_gradients_keep_their_type():
    """They pass through an autograd function of fully_shard, which strict checks have to know."""

    def check():
        from spmd_types import checker

        mesh = _mesh()
        tp, dp = (spmd.MeshAxis.of(mesh.get_group(name)) for name in ("tp", "dp"))
        types = {tp: spmd.R, dp: spmd.V}
        for package in PACKAGES:
            with spmd.set_current_mesh(mesh):
                model = annotated(mesh)
                dims = package.DataParallelMeshDims(shard="dp")
                package.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
                with checker.typecheck("strict"):
                    x = batch(0).requires_grad_()
                    spmd.assert_type(x, types)
                    model(x)
            assert model.seen[0][-1] == types

    run_ranks(check, 4)


def test_sharded_parameters_are_dtensors_on_all_axes():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model = annotated(mesh)
        dims = fsdp.DataParallelMeshDims(shard="dp")
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        weight, scale, _ = model.parameters()
        assert weight.device_mesh.mesh_dim_names == scale.device_mesh.mesh_dim_names == ("dp", "tp")
        assert (weight.placements[1], scale.placements[1]) == (Shard(0), Replicate())
        assert weight.shape == (8, 8)
        assert sum(param.to_local().numel() for param in model.parameters()) == (32 + 8 + 8) // 2
        model.unshard()
        assert [type(param.data) for param in model.parameters()] == [torch.Tensor] * 3


REFUSED = {
    "no dp_mesh_dims": (
        lambda tp, dp: {tp: spmd.R, dp: spmd.R}, None,
        r"spmd_types parameters require fully_shard\(\) to be called with both",
    ),
    "not R along dp": (
        lambda tp, dp: {tp: spmd.R, dp: spmd.I}, "dp", "Expected spmd.R on FSDP DP axis",
    ),
    "no axis but dp": (
        lambda tp, dp: {dp: spmd.R}, "dp", "partial spmd_types annotations that cannot be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_annotations_are_refused_and_nothing_changes(case):
    types, shard, sentence = REFUSED[case]
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        tp, dp = (spmd.MeshAxis.of(mesh.get_group(name)) for name in ("tp", "dp"))
        dims = None if shard is None else fsdp.DataParallelMeshDims(shard=shard)
        for package in PACKAGES:
            model = nn.Linear(4, 4, bias=False)
            spmd.assert_type(model.weight, types(tp, dp))
            weight = model.weight
            with pytest.raises(ValueError, match=sentence):
                package.fully_shard(
                    model, mesh=mesh if dims is not None else mesh["dp"], dp_mesh_dims=dims
                )
            assert model.weight is weight


def test_an_axis_without_annotation_is_refused_within_a_current_mesh():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh, spmd.set_current_mesh(mesh):
        dp = spmd.MeshAxis.of(mesh.get_group("dp"))
        for package in PACKAGES:
            model = nn.Linear(4, 4, bias=False)
            spmd.assert_type(model.weight, {dp: spmd.R})
            dims = fsdp.DataParallelMeshDims(shard="dp")
            with pytest.raises(ValueError, match="incomplete spmd_types annotations for FSDP"):
                package.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


def test_grad_placements_fn_is_refused_for_what_an_annotation_says_already():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model, dims = annotated(mesh), fsdp.DataParallelMeshDims(shard="dp")
        weight = model.weight
        with pytest.raises(ValueError, match="grad_placements_fn: expected None for parameter"):
            fsdp.fully_shard(
                model, mesh=mesh, dp_mesh_dims=dims,
                grad_placements_fn=lambda param: (Partial(), Partial()),
            )  # fmt: skip
        assert model.weight is weight
