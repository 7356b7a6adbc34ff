"""FSDP with tensor parallelism trains as one device, and as FSDP2 does."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp import MixedPrecisionPolicy, Rows, Tiles, clip_grad_norm_, fully_shard
from fsdp.mesh import placement_of
from fsdp.optim import Adam8bit
from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard, strict
from testkit import CommLog, fake_mesh, run_ranks

pytestmark = pytest.mark.ranks


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _model():
    torch.manual_seed(1)
    return nn.Sequential(Mlp(), Mlp())


def _train(model, rank, ranks):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(2, 4, 6)[rank::ranks].flatten(0, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("unflattened", [False, True])
def test_fsdp_with_tp_trains_as_on_one_device(unflattened):
    """The root of a mesh that was unflattened, as torchtitan does, has one axis of all ranks."""

    def check(unflattened):
        if unflattened:
            world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
            mesh = world._unflatten(0, (2, 2), ("dp", "tp"))
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = _model()
        for block in model:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert isinstance(model[0].up.weight.placements[0], StridedRaggedShard)
        assert isinstance(model[0].down.weight.placements[0], RaggedShard)
        _train(model, mesh.get_local_rank("dp"), 2)
        alone = _model()
        _train(alone, 0, 1)
        for (name, mine), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), wanted, rtol=1e-4, atol=1e-5, msg=name)

    run_ranks(check, 4, unflattened, timeout=120)


def test_gathered_dtensors_have_the_dtype_of_mixed_precision():
    """Their spec too, from which DTensor derives the dtypes of results."""
    policy, seen = MixedPrecisionPolicy(torch.bfloat16, torch.float32), []

    def look(module, _, out):
        weight, bias = module.weight, module.bias
        seen.extend([weight.dtype, weight._spec.tensor_meta.dtype, weight.sum() + bias.sum()])

    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        layers = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(_model()[0], mesh["tp"], layers)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        model.up.register_forward_hook(look)
        model(torch.ones(2, 6)).sum().backward()
        weight, spec, total = seen
        assert (weight, spec) == (torch.bfloat16, torch.bfloat16)
        assert total._spec.tensor_meta.dtype == total.dtype == torch.bfloat16
        grad = model.up.weight.grad
        assert grad._spec.tensor_meta.dtype == grad.dtype == torch.float32


def test_gradients_may_be_placed_otherwise_in_each_step():
    """As of other branches of a model: along dp they are terms, their mean, or the whole."""
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        weight = DTensor.from_local(torch.zeros(2, 4), mesh, [Replicate(), Shard(0)])
        placement = placement_of(weight, mesh["dp"], "weight")
        own = placement.spec.placements
        expected = {
            (Partial(), Shard(0)): (None, 1),
            (Partial("avg"), Shard(0)): (None, 2),
            (Replicate(), Shard(0)): (None, 2),
            (Partial(), Partial()): ((Partial(), own[1]), 1),
            (Replicate(), Replicate()): (own, 2),
        }
        for _ in range(2):
            for source, (target, terms) in expected.items():
                grad = DTensor.from_local(torch.zeros(2, 4), mesh, source, run_check=False)
                for _ in range(2):
                    found = placement.grad_conversion(grad)
                    assert (found.source, found.target, found.terms) == (source, target, terms)


def test_gradients_that_tensor_parallelism_reduces_are_summed_in_the_reduce_dtype():
    """Those of a norm between parts of a sequence: torch before 2.15 sums them in bfloat16."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        norm = distribute_module(nn.RMSNorm(8), mesh["tp"])
        fully_shard(norm, mesh=mesh["dp"], mp_policy=policy)
        x = distribute_tensor(torch.randn(4, 8), mesh["tp"], [Shard(0)]).bfloat16()
        out = norm(x)
        with CommLog() as log:
            out.sum().backward()
        assert norm.weight.grad.dtype == torch.float32
        return {call.dtype for call in log.calls if call.op != "barrier"}

    assert run_ranks(check, 4) == [{"float32"}] * 4


def test_meshes_without_a_common_root_are_refused():
    def check():
        model = nn.Linear(4, 4)
        parallelize_module(model, init_device_mesh("cpu", (2,)), ColwiseParallel())
        with pytest.raises(ValueError, match=r"'weight' is a DTensor on axes \(\)"):
            fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))

    run_ranks(check, 2)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replicated"])
def test_parameters_on_all_axes_get_gradients_of_their_placements(placement):
    """A plan over the whole mesh makes such parameters; gradients are placed as DTensors."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = distribute_module(_model(), mesh)  # replicated over all
        for block in model:
            weight = distribute_tensor(
                block.up.weight.detach().to_local(), mesh, [Replicate(), Shard(0)]
            )
            block.up.weight = nn.Parameter(weight)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert isinstance(model[0].up.weight.placements[0], StridedRaggedShard)
        alone = _model()
        for one in (model, alone):
            torch.manual_seed(0)
            x = torch.randn(4, 6)
            if one is model:
                x = distribute_tensor(x, mesh, [placement, Replicate()])
            one(x).square().mean().backward()
        for (name, mine), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad, msg=name)

    run_ranks(check, 4, timeout=120)


class Scale(nn.Module):
    """Returns a sum over rows, so that ranks with different rows have terms of the gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.weight, self.bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        self.kind = type(self.weight)
        return (x * self.weight + self.bias).square().sum()


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp",), ("dp",), ()], ids=str)
def test_modules_compute_with_local_tensors_whose_gradients_are_placed(axes):
    """Rows are sharded along some axes; along the others every rank has the whole gradient."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, alone = distribute_module(Scale(), mesh), Scale()
        placements = [Partial() if axis in axes else Replicate() for axis in ("dp", "tp")]
        fully_shard(model, mesh=mesh["dp"], grad_placements_fn=lambda param: placements)
        x = torch.arange(24.0).view(4, 6)
        rows = x
        for axis in axes:
            rows = rows.chunk(2)[mesh.get_local_rank(axis)]
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            model(rows).backward()
            alone(x).backward()
        assert model.kind is nn.Parameter
        assert isinstance(model.weight, DTensor)
        for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            assert mine.grad.placements == mine.placements
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)

    run_ranks(check, 4)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Replicate()], r"expected for each axis of parameter 'weight' Partial, or"),
        ([Replicate(), Shard(0)], r"the parameter's placement in .*, got \(Replicate\(\), Shard"),
    ],
    ids=["too few", "another"],
)
def test_placements_that_a_gradient_cannot_have_are_refused(placements, message):
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        model = distribute_module(Scale(), mesh)
        with pytest.raises(ValueError, match=message):
            fully_shard(model, mesh=mesh["dp"], grad_placements_fn=lambda param: placements)
        plain = Scale()
        with pytest.raises(ValueError, match="expected None for parameter 'weight', which is no D"):
            fully_shard(plain, mesh=mesh["dp"], grad_placements_fn=lambda param: [Replicate()])
        assert type(plain.weight) is nn.Parameter


def test_partial_gradients_are_reduced_once():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = distribute_module(_model(), mesh)
        for block in model:
            fully_shard(block, mesh=mesh, strategy="native")
        fully_shard(model, mesh=mesh, strategy="native")
        x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        loss = model(x).square().sum().to_local()
        with CommLog() as log:
            loss.backward()
        log.assert_counts({"all_gather": 2, "reduce_scatter": 2})

    run_ranks(check, 2)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_parameters_sharded_on_the_fsdp_axis_are_resharded(placement):
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model, wanted = nn.Linear(6, 5), nn.Linear(6, 5)
        model.weight = nn.Parameter(distribute_tensor(wanted.weight.detach(), mesh, [placement]))
        model.bias = nn.Parameter(distribute_tensor(wanted.bias.detach(), mesh, [Shard(0)]))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Rows(2))
        assert torch.equal(model.weight.full_tensor(), wanted.weight)
        assert torch.equal(model.bias.full_tensor(), wanted.bias)
        assert tuple(model.weight.to_local().shape) in ((2, 6), (3, 6), (4, 6), (1, 6))

    run_ranks(check, 2)


def test_rows_sharded_by_another_axis_are_not_split():
    """Only dim 0 is ragged then, and each rank has a matrix."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, wanted = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
        weight = distribute_tensor(wanted.weight.detach(), mesh["tp"], [Shard(1)])
        model.weight = nn.Parameter(weight)
        fully_shard(model, mesh=mesh["dp"])
        assert model.weight.placements[0].dims == (0,)
        assert model.weight.to_local().shape[1] == 3
        assert torch.equal(model.weight.full_tensor(), wanted.weight)

    run_ranks(check, 4)


class Fused(nn.Module):
    """A matrix with three interleaved parts of its rows, and one with two of its columns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.rows, self.columns = nn.Linear(8, 24), nn.Linear(16, 8, bias=False)


CUTS = {
    "rows.weight": InterleavedShard(0, 3),
    "rows.bias": InterleavedShard(0, 3),
    "columns.weight": InterleavedShard(1, 2),
}


def _fused(mesh, granularity):
    model = Fused()
    for name, placement in CUTS.items():
        module, key = model.get_submodule(name.split(".")[0]), name.split(".")[1]
        whole = getattr(module, key).detach()
        setattr(module, key, nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement])))
    return fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda param: granularity)


def _fused_state(model):
    return dict(model.named_parameters())


def test_interleaved_parameters_are_clipped_stepped_and_saved(tmp_path):
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, alone = _fused(mesh, Rows(2)), Fused()
        kinds = [type(param.placements[0]) for param in model.parameters()]
        assert kinds == [StridedRaggedShard, StridedRaggedShard, RaggedShard]
        pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
        for mine, other in pairs:
            assert torch.equal(mine.full_tensor(), other)
            mine.grad, other.grad = mine.detach() * 3, other.detach() * 3
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        with strict():  # nothing is gathered
            torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), norm)
        for one in (model, alone):
            Adam8bit(one.named_parameters(), lr=1e-2, block_size=4, min_8bit_size=0).step()
        for mine, other in pairs:
            torch.testing.assert_close(mine.full_tensor(), other, rtol=1e-3, atol=1e-3)
        dcp.save(_fused_state(model), checkpoint_id=tmp_path)
        return [mine.full_tensor() for mine, _ in pairs]

    def load(wanted):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = _fused(mesh, None)
        dcp.load(_fused_state(model), checkpoint_id=tmp_path)
        for mine, other in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(mine.full_tensor(), other)

    run_ranks(load, 2, run_ranks(check, 4, timeout=120)[0], timeout=60)


def test_tiles_split_by_interleaved_chunks_are_refused_by_name():
    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Linear(8, 24, bias=False)  # 4 rows of each of three chunks are 12
        weight = distribute_tensor(model.weight.detach(), mesh["tp"], [InterleavedShard(0, 3)])
        model.weight = nn.Parameter(weight)
        with pytest.raises(ValueError, match=r"'weight' .* expected a multiple of 18 there"):
            fully_shard(model, mesh=mesh["dp"], quantize_fn=lambda param: Tiles(rows=6, cols=4))
        fully_shard(model, mesh=mesh["dp"], quantize_fn=lambda param: Tiles(rows=4, cols=4))
        assert isinstance(model.weight.placements[0], StridedRaggedShard)

    run_ranks(check, 2)


def test_flattened_axes_must_follow_each_other_in_the_mesh():
    with fake_mesh((2, 2, 2), ("a", "tp", "b")) as mesh:
        model = distribute_module(_model(), mesh)
        with pytest.raises(ValueError, match=r"flattens .*; expected axes that follow each other"):
            fully_shard(model, mesh=mesh["a", "b"]._flatten("data"))


def test_flattened_axes_of_one_rank_may_be_anywhere_in_the_mesh():
    """Such as "cp" behind the axis of experts, where sequences are not sharded."""
    with fake_mesh((2, 2, 1), ("dp", "ep", "cp")) as mesh:
        model = nn.Linear(8, 8, bias=False)
        placed = [Replicate(), Shard(0), Replicate()]
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, placed))
        fully_shard(model, mesh=mesh["dp", "cp"]._flatten("data"))
        assert model.weight.device_mesh.mesh_dim_names == ("data", "ep", "cp")
        model.unshard()
        assert model.weight.placements == tuple(placed)


@pytest.mark.parametrize(
    ("shape", "names", "data", "sizes"),
    [
        pytest.param((1, 2, 2), ("a", "b", "tp"), ("a", "b"), (2,), marks=pytest.mark.slow),
        ((2, 2), ("dp", "tp"), ("dp",), (2, 1)),
        pytest.param((2, 2), ("dp", "tp"), ("dp",), (1, 2), marks=pytest.mark.slow),
        pytest.param((4, 1), ("dp", "tp"), ("dp",), (2, 2), marks=pytest.mark.slow),
    ],
)
def test_fsdp_axes_may_flatten_or_split_the_axes_of_a_parameter(shape, names, data, sizes):
    """A plan over the whole mesh makes such parameters; TP shards them too, or there is no TP.

    fully_shard's axis may flatten several axes of the parameter (experts), and its two axes may be
    one of the parameter's (HSDP). Gradients are terms of a sum along these, and not averaged.
    """

    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model, alone = distribute_module(_model(), mesh), _model()
        for block in model:
            placed = [Shard(0) if name == "tp" else Replicate() for name in names]
            weight = distribute_tensor(block.up.weight.detach().to_local(), mesh, placed)
            block.up.weight = nn.Parameter(weight)
        own = mesh[data]
        if len(data) > 1:
            own = own._flatten("data")
        else:
            own = own._unflatten(0, sizes, ("copies", "shards"))
        for block in model:
            fully_shard(block, mesh=own)
        fully_shard(model, mesh=own)
        up, down = model[0].up.weight, model[0].down.weight
        assert up.device_mesh.mesh_dim_names == (*own.mesh_dim_names, "tp")
        local_numel = torch.tensor(up.to_local().numel())
        dist.all_reduce(local_numel)
        assert local_numel == alone[0].up.weight.numel() * (sizes[0] if len(sizes) > 1 else 1)
        assert torch.equal(up.full_tensor(), alone[0].up.weight)
        assert torch.equal(down.full_tensor(), alone[0].down.weight)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        given = [Shard(0) if name == data[-1] else Replicate() for name in names]
        model(distribute_tensor(x, mesh, given)).square().mean().backward()
        alone(x).square().mean().backward()
        for (name, mine), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad, msg=name)

    run_ranks(check, 4, timeout=120)
