"""`fully_shard` with ``dp_mesh_dims``: meshes of all parallelism, as of FSDP2."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import fsdp
from fsdp import DataParallelMeshDims
from ragged_shard import RaggedShard
from testkit import CommLog, fake_mesh, run_ranks

native = pytest.mark.skipif(
    not hasattr(torch_fsdp, "DataParallelMeshDims"), reason="torch 2.13 or newer has dp_mesh_dims"
)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def _model():
    torch.manual_seed(1)
    return nn.Sequential(Mlp(), Mlp())


def _placed(mesh, tp):
    """The model on all axes of a mesh: column- and row-parallel along tp, replicated elsewhere."""

    def place(name, module, mesh):
        if isinstance(module, nn.Linear):
            placements = [Replicate()] * mesh.ndim
            if tp is not None:
                dim = 0 if name.endswith("up") else 1
                placements[mesh.mesh_dim_names.index(tp)] = Shard(dim)
            weight = distribute_tensor(module.weight.detach(), mesh, placements)
            module.weight = nn.Parameter(weight)

    return distribute_module(_model(), mesh, place)


def _shard(package, mesh, tp, dims, **options):
    model = _placed(mesh, tp)
    made = package.DataParallelMeshDims(**dims)
    for block in model:
        package.fully_shard(block, mesh=mesh, dp_mesh_dims=made, **options)
    return package.fully_shard(model, mesh=mesh, dp_mesh_dims=made, **options)


def _losses(model, mesh, batch_axes):
    """Trains on each rank's part of a batch; the losses, and the parameters at the end.

    The loss is DTensor's mean of all ranks, so gradients are terms of a sum.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    placements = [Shard(0) if name in batch_axes else Replicate() for name in mesh.mesh_dim_names]
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(4, 6)
        if mesh is not None:
            batch = distribute_tensor(batch, mesh, placements, src_data_rank=None)
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [param.full_tensor().detach() for param in model.parameters()]


def _alone():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _summing(model):
    for module in model.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no factors
    return model


# By name: the mesh, its axis of tensor parallelism, and the axes of data parallelism.
CASES = {
    "FSDP": ({"dp": 4}, None, {"shard": "dp"}),
    "FSDP x TP": ({"dp": 2, "tp": 2}, "tp", {"shard": "dp"}),
    "HSDP": ({"replicate": 2, "shard": 2}, None, {"shard": "shard", "replicate": "replicate"}),
    "two axes shard": ({"dp": 2, "cp": 2}, None, {"shard": ("dp", "cp")}),
    "two axes shard x TP": ({"dp": 2, "cp": 1, "tp": 2}, "tp", {"shard": ("dp", "cp")}),
    "HSDP, two axes shard": (
        {"replicate": 2, "dp": 1, "cp": 2}, None, {"shard": ("dp", "cp"), "replicate": "replicate"},
    ),
    "DDP": ({"dp": 4}, None, {"replicate": "dp"}),
    "DDP x TP": ({"dp": 2, "tp": 2}, "tp", {"replicate": "dp"}),
    "TP x two axes shard": ({"tp": 2, "dp": 1, "cp": 2}, "tp", {"shard": ("dp", "cp")}),
    "TP x DDP": ({"tp": 2, "dp": 2}, "tp", {"replicate": "dp"}),
}  # fmt: skip
FAST = ("FSDP x TP", "HSDP, two axes shard")


@native
@pytest.mark.ranks
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, id="fast"),
        pytest.param(
            [name for name in CASES if name not in FAST], id="more", marks=pytest.mark.slow
        ),
    ],
)
def test_every_mesh_trains_as_fsdp2_and_as_one_device(names):
    def check():
        found, meshes = {}, {}  # of equal meshes DTensor's caches return the first
        for name in names:
            axes, tp, dims = CASES[name]
            key = tuple(axes.items())
            if key not in meshes:
                meshes[key] = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=(*axes,))
            mesh = meshes[key]
            batch_axes = [axis for axis in axes if axis != tp]
            results = [
                _losses(_summing(_shard(package, mesh, tp, dims)), mesh, batch_axes)
                for package in (fsdp, torch_fsdp)
            ]
            found[name] = results
        return found

    expected = _alone()
    for found in run_ranks(check, 4, timeout=120):
        for name, ((losses, params), (native_losses, native_params)) in found.items():
            # Four ranks' gradients are summed in another order.
            assert losses == pytest.approx(native_losses, rel=1e-6), name
            assert losses == pytest.approx(expected, rel=1e-5), name
            for one, other in zip(params, native_params, strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-5), name


@native
@pytest.mark.ranks
def test_gradients_are_averaged_as_by_fsdp2():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return [
            _losses(_shard(package, mesh, None, {"shard": "dp"}), mesh, ["dp"])
            for package in (fsdp, torch_fsdp)
        ]

    for (losses, params), (native_losses, native_params) in run_ranks(check, 2):
        assert losses == native_losses
        assert losses[1:] != pytest.approx(_alone()[1:], rel=1e-3)  # which sums
        for one, other in zip(params, native_params, strict=True):
            assert torch.equal(one, other)


def test_axes_of_data_parallelism_are_those_of_the_sharded_parameter():
    with fake_mesh((2, 2, 2), ("replicate", "dp", "tp")) as mesh:
        dims = {"shard": "dp", "replicate": "replicate"}
        model = _shard(fsdp, mesh, "tp", dims)
        weight = model[0].down.weight
        assert weight.device_mesh.mesh_dim_names == ("replicate", "dp", "tp")
        assert isinstance(weight.placements[1], RaggedShard)
        assert (weight.placements[0], weight.placements[2]) == (Replicate(), Shard(1))
        numel = sum(param.to_local().numel() for param in model[0].parameters())
        assert numel == sum(param.numel() for param in model[0].parameters()) // 4


def test_ddp_gathers_nothing_and_reduces_once_a_group():
    """The axis that shards has one rank."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = _shard(fsdp, mesh, None, {"replicate": "dp"}, strategy="native")
        batch = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)], src_data_rank=None)
        model(batch).sum().backward()  # makes buffers
        with CommLog() as log:
            model(batch).to_local().sum().backward()
        return log.counts()

    assert run_ranks(check, 2) == [{"all_reduce": 2}] * 2


REFUSED = {
    "no such axis": (("dp", "tp"), {"shard": "pp"}, r"Mesh dim name 'pp' not found in mesh"),
    "sharded already": (
        ("dp", "tp"), {"shard": "tp"}, r"Expected Replicate\(\) on DP shard dim 'tp'",
    ),
    "replicas too": (
        ("dp", "tp"), {"shard": "dp", "replicate": "tp"},
        r"Expected Replicate\(\) on DP replicate dim 'tp'",
    ),
    "one axis twice": (
        ("dp", "tp"), {"shard": "dp", "replicate": "dp"}, "expected each axis once, got 'dp'",
    ),
    "no names": (None, {"shard": "dp"}, "expected mesh= with mesh_dim_names"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_axes_are_refused_and_nothing_changes(case):
    names, dims, sentence = REFUSED[case]
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model = _placed(mesh, "tp")
        before = list(model.parameters())
        given = mesh if names else DeviceMesh("cpu", mesh.mesh)
        with pytest.raises(ValueError, match=sentence):
            fsdp.fully_shard(model, mesh=given, dp_mesh_dims=DataParallelMeshDims(**dims))
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_plain_parameters_and_another_mesh_are_refused():
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        dims = DataParallelMeshDims(shard="dp")
        with pytest.raises(ValueError, match="all parameters must be DTensors on the full SPMD"):
            fsdp.fully_shard(_model(), mesh=mesh, dp_mesh_dims=dims)
        with pytest.raises(ValueError, match="to be the same mesh passed to fully_shard"):
            fsdp.fully_shard(_placed(mesh["dp"], None), mesh=mesh, dp_mesh_dims=dims)


def test_dims_without_any_are_refused():
    with pytest.raises(ValueError, match="At least one of shard or replicate must be set"):
        DataParallelMeshDims()
