"""Tensors of a buffer as DTensors: meshes of two axes, checkpoints, optimizers."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from dbuffer import DBuffer, Inner
from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from ragged_shard.planner import TensorSpec, plan_layout
from testkit import run_ranks

pytestmark = pytest.mark.ranks

S0, R = Shard(0), Replicate()
SHAPES = {
    "rows": (6, 4),
    "flat": (7,),
    "scalar": (),
    "empty": (0, 3),
    "whole": (3, 3),
    "odd": (5, 3),
}
BLOCKS = {"rows": 8, "whole": 9, "odd": 4}


def layout_of(world_size, alignment=4):
    specs = [TensorSpec(n, torch.Size(s).numel(), BLOCKS.get(n, 1), s) for n, s in SHAPES.items()]
    return plan_layout(specs, world_size, alignment=alignment)


def contents(seed=0):
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def filled(mesh, placements, seed=0, **options):
    layout = layout_of(mesh.size(-1))
    buffer = DBuffer(layout, mesh, placements, torch.float32, **options)
    buffer.copy_from(contents(seed))
    return buffer


def wholes(shape, placements):
    mesh = init_device_mesh("cpu", shape)
    buffer = filled(mesh, placements)
    return all(
        torch.equal(buffer.dtensor(name).full_tensor(), tensor)
        and buffer.dtensor(name).to_local().untyped_storage().data_ptr()
        == buffer.memory.bytes.untyped_storage().data_ptr()
        for name, tensor in contents().items()
    )


@pytest.mark.parametrize(
    ("shape", "placements"),
    [((2,), [S0]), ((4,), [S0]), ((2, 2), [R, S0]), ((2,), [R]), ((2, 2), [R, R])],
    ids=["2 shards", "4 shards", "hybrid", "replica", "replicas"],
)
def test_a_dtensor_is_the_whole_tensor(shape, placements):
    assert all(run_ranks(wholes, torch.Size(shape).numel(), shape, placements))


def partial_sum():
    mesh = init_device_mesh("cpu", (2,))
    buffer = filled(mesh, [Partial()], seed=dist.get_rank())
    first, second = contents(0), contents(1)
    return all(torch.equal(buffer.dtensor(n).full_tensor(), first[n] + second[n]) for n in SHAPES)


def test_a_partial_buffers_dtensor_is_partial():
    assert run_ranks(partial_sum, 2) == [True, True]


def tensor_parallel():
    """Weights that tensor parallelism shards on dim 0, on dim 1, and not at all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    given = {"column": torch.randn(8, 6), "row": torch.randn(4, 6), "norm": torch.randn(6)}
    given |= {"qkv": torch.randn(12, 6), "fused row": torch.randn(4, 12)}
    inner = {"column": Shard(0), "row": Shard(1), "norm": R}
    inner |= {"qkv": InterleavedShard(0, 3), "fused row": InterleavedShard(1, 3)}
    parts = {n: distribute_tensor(t, mesh["tp"], [inner[n]]) for n, t in given.items()}
    local = {n: part.to_local().contiguous() for n, part in parts.items()}
    specs = [
        TensorSpec(n, t.numel(), t.shape[-1] if t.ndim > 1 else 1, tuple(t.shape))
        for n, t in local.items()
    ]
    layout = plan_layout(specs, 2)
    how = {n: Inner(mesh, (inner[n],), tuple(t.shape)) for n, t in given.items()}
    buffer = DBuffer(layout, mesh["fsdp"], [S0], torch.float32, inner=how, full=True)
    buffer.copy_from(local)
    found = {n: buffer.dtensor(n) for n in given}
    good = [torch.equal(found[n].full_tensor(), t) for n, t in given.items()]
    kinds = {n: type(d.placements[0]).__name__ for n, d in found.items()}
    buffer.all_gather_()
    good += [torch.equal(buffer.dtensor(n).full_tensor(), t) for n, t in given.items()]
    try:
        wrong = {"norm": Inner(mesh, (Shard(0),), (6,))}
        DBuffer(layout, mesh["fsdp"], [S0], torch.float32, inner=wrong)
    except ValueError as error:
        return good, kinds, str(error)
    return good, kinds, ""


def test_inner_axes_are_placed_beside_the_buffers():
    for good, kinds, error in run_ranks(tensor_parallel, 4):
        assert all(good)
        strided, ragged = StridedRaggedShard.__name__, RaggedShard.__name__
        assert kinds == {
            "column": strided, "row": ragged, "norm": ragged, "qkv": strided, "fused row": ragged
        }  # fmt: skip
        assert "'norm'" in error
        assert "local shape (3,)" in error


def uneven_tensor_parallelism():
    """Vocabularies and experts that tensor parallelism does not divide, and a single expert."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    given = {"rows": torch.randn(11, 6), "experts": torch.randn(3, 4, 2), "one": torch.randn(1, 8)}
    given["qkv"], given["columns"] = torch.randn(9, 6), torch.randn(4, 12)
    how = {n: Shard(0) for n in given} | {"qkv": InterleavedShard(0, 3)}
    how["columns"] = InterleavedShard(1, 1, unit=4)  # 8 columns and 4
    inner = {n: Inner(mesh, (how[n],), tuple(t.shape)) for n, t in given.items()}
    largest = {"rows": (6, 6), "experts": (2, 4, 2), "one": (1, 8), "qkv": (6, 6)}
    largest["columns"] = (4, 8)
    blocks = {"rows": 6, "experts": 3, "one": 1, "qkv": 18, "columns": 32}
    specs = [TensorSpec(n, torch.Size(s).numel(), blocks[n], s) for n, s in largest.items()]
    layout = plan_layout(specs, 2)
    local = {
        n: distribute_tensor(t, mesh["tp"], [how[n]], src_data_rank=None).to_local().contiguous()
        for n, t in given.items()
    }
    buffer = DBuffer(layout, mesh["fsdp"], [S0], torch.float32, inner=inner, full=True)
    buffer.local.fill_(float("nan"))
    buffer.copy_from(local)
    assert buffer.local.isfinite().all()  # what is behind a smaller tensor is zero, as padding
    for n, tensor in given.items():
        assert torch.equal(buffer.dtensor(n).full_tensor(), tensor), n
    parts = [tensor.local for tensor in buffer.report().tensors]
    assert parts == [buffer.shard(n).numel() for n in given]
    buffer.all_gather_()
    for n, tensor in given.items():
        assert torch.equal(buffer.view(n), local[n]), n
        assert torch.equal(buffer.dtensor(n).full_tensor(), tensor), n
    rest = buffer.local.sum() - sum(one.sum() for one in local.values())
    assert abs(rest) < 1e-4
    buffer.set_placements([Partial()])
    buffer.add_from(local)
    buffer.reduce_scatter_()
    for n, tensor in given.items():  # each of two ranks has added its own
        torch.testing.assert_close(buffer.dtensor(n).full_tensor(), tensor * 4)
    refused = {}
    for n, other in {
        "rows": Inner(mesh, (Shard(1),), (6, 11)),
        "experts": Inner(mesh, (Shard(0),), (5, 4, 2)),
    }.items():
        try:
            DBuffer(layout, mesh["fsdp"], [S0], torch.float32, inner=inner | {n: other})
        except ValueError as error:
            refused[n] = str(error)
    try:
        buffer.copy_from(local | {"rows": torch.ones(7, 6)})
    except ValueError as error:
        refused["copy"] = str(error)
    return refused, local["rows"].shape


def test_tensors_that_inner_axes_do_not_divide_are_padded_to_the_largest():
    for refused, shape in run_ranks(uneven_tensor_parallelism, 4):
        assert "pad dim 1 to a multiple of 2" in refused["rows"]
        assert "with its local shape (3, 4, 2)" in refused["experts"]
        assert f"of shape {tuple(shape)}, got (7, 6)" in refused["copy"]


def saved(path):
    mesh = init_device_mesh("cpu", (4,))
    buffer = filled(mesh, [S0])
    dcp.save({n: buffer.dtensor(n) for n in SHAPES if n != "empty"}, checkpoint_id=path)
    other = filled(mesh, [S0], seed=1)
    state = {n: other.dtensor(n) for n in SHAPES if n != "empty"}
    dcp.load(state, checkpoint_id=path)
    return torch.equal(other.local, buffer.local)


def loaded(path):
    """By two ranks and replicas of two, what four have saved."""
    mesh = init_device_mesh("cpu", (1, 2))
    good = []
    for placements in ([R, S0], [R, R]):
        buffer = filled(mesh, placements, seed=1)
        dcp.load({n: buffer.dtensor(n) for n in SHAPES if n != "empty"}, checkpoint_id=path)
        wanted = filled(mesh, placements)
        good.append(torch.equal(buffer.local, wanted.local))
    return good


def test_checkpoints_are_written_from_the_buffer_and_read_into_it(tmp_path):
    assert all(run_ranks(saved, 4, str(tmp_path)))
    assert all(all(good) for good in run_ranks(loaded, 2, str(tmp_path)))


def optimized():
    """Some steps of AdamW on the DTensors, and on plain tensors."""
    mesh = init_device_mesh("cpu", (2,))
    names = [n for n in SHAPES if n != "empty"]
    weight, grad = filled(mesh, [S0]), filled(mesh, [S0], seed=1)
    address = weight.local.data_ptr()
    params = [torch.nn.Parameter(weight.dtensor(n)) for n in names]
    plain = [torch.nn.Parameter(contents()[n]) for n in names]
    for tensors, grads in (
        (params, [grad.dtensor(n) for n in names]), (plain, [contents(1)[n] for n in names])
    ):  # fmt: skip
        optimizer = torch.optim.AdamW(tensors, lr=0.1)
        for _ in range(3):
            for tensor, value in zip(tensors, grads, strict=True):
                tensor.grad = value
            optimizer.step()
    stepped = [weight.dtensor(n).full_tensor() for n in names]
    good = [torch.allclose(a, b.detach()) for a, b in zip(stepped, plain, strict=True)]
    return all(good) and weight.local.data_ptr() == address


def test_an_optimizer_steps_what_is_in_the_buffer():
    assert run_ranks(optimized, 2) == [True, True]
