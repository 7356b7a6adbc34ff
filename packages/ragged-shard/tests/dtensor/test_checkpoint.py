"""DCP: what is saved under one placement loads under any other, on any number of ranks."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._state_dict_utils import _broadcast_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from testkit import CommLog, assert_bitwise, each_rank, fake_mesh, run_ranks

pytestmark = pytest.mark.ranks

R = Replicate()
SHAPE = (12, 4, 2)


def value(offset=0):
    return torch.arange(96.0).reshape(SHAPE) + offset


def placements(world_size):
    pad = (0,) * (world_size - 2)
    if world_size == 1:
        return [RaggedShard((0,), (3,)), RaggedShard((0, 1, 2), (96,)), R, Shard(2)]
    return [
        RaggedShard((0,), (5, 7, *pad)),
        RaggedShard((0, 1), (*pad, 1, 2)),
        RaggedShard((0, 1, 2), (7, 89, *pad)),
        RaggedShard.owned_by(world_size - 1, world_size),
        InterleavedShard(0, 3),
        InterleavedShard(2, 1),
        InterleavedShard(0, 2, unit=2),
        Shard(0),
        Shard(2),
        R,
    ]


def names(world_size):
    return {f"{index}": placement for index, placement in enumerate(placements(world_size))}


def save(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        name: distribute_tensor(value(int(name)), mesh, [placement])
        for name, placement in names(dist.get_world_size()).items()
    }
    with CommLog() as log:
        dcp.save(state, checkpoint_id=path)
    tensor_bytes = value().numel() * value().element_size()
    assert log.bytes("all_to_all") == 0, log.calls
    # Plans and metadata travel as pickled objects (uint8), tensor data (float32) does not.
    assert not [call for call in log.calls if call.dtype == "float32"], (tensor_bytes, log.calls)


def load(path, saved_world_size):
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    for placement in placements(world_size):
        state = {
            name: distribute_tensor(torch.zeros(SHAPE), mesh, [placement])
            for name in names(saved_world_size)
        }
        dcp.load(state, checkpoint_id=path)
        for name, tensor in state.items():
            assert tensor.placements == (placement,)
            assert_bitwise(tensor.full_tensor(), value(int(name)), f"{name} as {placement}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_checkpoint_of_four_ranks_loads_on_fewer(tmp_path, world_size):
    run_ranks(save, 4, tmp_path)
    run_ranks(load, world_size, tmp_path, 4)


def test_a_checkpoint_of_two_ranks_loads_on_four(tmp_path):
    run_ranks(save, 2, tmp_path)
    run_ranks(load, 4, tmp_path, 2)


def two_axes(path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    layouts = [
        (StridedRaggedShard((0,), (1, 5), 2), Shard(0)),
        (StridedRaggedShard((0,), (1, 5), 2), InterleavedShard(0, 3)),
        (RaggedShard((0, 1), (1, 2)), Shard(2)),
        (R, RaggedShard((0,), (5, 7))),
        (RaggedShard((0,), (1, 2)), InterleavedShard(0, 3)),
        (RaggedShard((0, 1), (1, 2)), InterleavedShard(2, 1, unit=2)),
        (RaggedShard((0, 1, 2), (1, 2)), InterleavedShard(1, 2)),
        (Shard(1), InterleavedShard(0, 2)),
        (Shard(0), Shard(1)),
    ]
    state = {str(i): distribute_tensor(value(i), mesh, layout) for i, layout in enumerate(layouts)}
    dcp.save(state, checkpoint_id=path)
    for layout in layouts:
        other = {name: distribute_tensor(torch.zeros(SHAPE), mesh, layout) for name in state}
        dcp.load(other, checkpoint_id=path)
        for name, tensor in other.items():
            assert_bitwise(tensor.full_tensor(), value(int(name)), f"{name} as {layout}")


def on_one_axis(path, count):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in placements(dist.get_world_size()):
        other = {
            str(i): distribute_tensor(torch.zeros(SHAPE), mesh, [placement]) for i in range(count)
        }
        dcp.load(other, checkpoint_id=path)
        for name, tensor in other.items():
            assert_bitwise(tensor.full_tensor(), value(int(name)), f"{name} as {placement}")


def test_two_axes_to_two_axes_and_to_one(tmp_path):
    run_ranks(two_axes, 4, tmp_path)
    run_ranks(on_one_axis, 2, tmp_path, 8)


def other_tensors(path):
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "scalar": distribute_tensor(torch.tensor(3.0), mesh, [RaggedShard.owned_by(1, 2)]),
        "empty": distribute_tensor(torch.empty(0, 3), mesh, [RaggedShard((0,), (1, 1))]),
        "bf16": distribute_tensor(value().bfloat16(), mesh, [RaggedShard((0,), (5, 7))]),
    }
    future = dcp.async_save(state, checkpoint_id=path)
    future.result()
    other = {
        "scalar": distribute_tensor(torch.tensor(0.0), mesh, [RaggedShard.owned_by(0, 2)]),
        "empty": distribute_tensor(torch.empty(0, 3), mesh, [RaggedShard((0,), (1, 1))]),
        "bf16": distribute_tensor(torch.zeros_like(value().bfloat16()), mesh, [Shard(2)]),
    }
    dcp.load(other, checkpoint_id=path)
    assert other["scalar"].full_tensor() == 3.0
    assert_bitwise(other["bf16"].full_tensor(), value().bfloat16(), "bf16")


def test_async_save_scalars_empty_tensors_and_bf16(tmp_path):
    run_ranks(other_tensors, 2, tmp_path)


def module(mesh, units):
    torch.manual_seed(0)
    layer = nn.Linear(8, 12)
    for name, parameter in list(layer.named_parameters()):
        placed = distribute_tensor(parameter.detach(), mesh, [RaggedShard((0,), units)])
        layer.register_parameter(name, nn.Parameter(placed))
    return layer, torch.optim.AdamW(layer.parameters(), lr=0.1)


def step(layer, optimizer, seed):
    for index, parameter in enumerate(layer.parameters()):
        generator = torch.Generator().manual_seed(10 * seed + index)
        grad = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
    optimizer.step()
    optimizer.zero_grad()


def optimizer_state(path, units, saved_units):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer, optimizer = module(mesh, units)
    if saved_units is None:
        for seed in range(3):
            step(layer, optimizer, seed)
        model, optim = get_state_dict(layer, optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=path)
    else:
        model, optim = get_state_dict(layer, optimizer)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
        set_state_dict(layer, optimizer, model_state_dict=model, optim_state_dict=optim)
    step(layer, optimizer, 3)
    return [parameter.full_tensor() for parameter in layer.parameters()]


def test_optimizer_state_goes_on_under_other_units(tmp_path):
    first = run_ranks(optimizer_state, 4, tmp_path, (1, 0, 2, 3), None)[0]
    for world_size, units in ((1, (1,)), (2, (5, 7)), (3, (0, 1, 1))):
        [again, *_] = run_ranks(optimizer_state, world_size, tmp_path, units, (1, 0, 2, 3))
        for a, b in zip(first, again, strict=True):
            assert_bitwise(b, a, f"{world_size} ranks")


def from_rank_zero(meta):
    mesh = init_device_mesh("cpu", (2,))
    layer, _ = module(mesh, (5, 7))
    expected = {name: torch.full(p.shape, 7.0) for name, p in layer.named_parameters()}
    if meta:
        for name, parameter in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device="meta")))
    full = dict(expected) if dist.get_rank() == 0 else {}  # torch writes into it
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if meta:
        local = dict(layer.named_parameters())
        assert all(p.placements == (RaggedShard((0,), (5, 7)),) for p in local.values())
        _broadcast_state_dict(full, local, device=torch.device("cpu"))
        layer.load_state_dict(local, assign=True)
    else:
        set_model_state_dict(layer, full, options=options)
    for name, parameter in layer.named_parameters():
        assert parameter.placements == (RaggedShard((0,), (5, 7)),)
        assert_bitwise(parameter.full_tensor(), expected[name], name)


@pytest.mark.parametrize("meta", [False, True], ids=["in place", "from meta"])
def test_a_full_state_dict_of_rank_zero_is_broadcast_into_ragged_parameters(meta):
    run_ranks(from_rank_zero, 2, meta)


def saved_alone(path):
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(value(), mesh, [RaggedShard((0, 1), (1, 2))])
    own = path / f"{dist.get_rank()}.pt"
    torch.save({"a": tensor}, own)
    back = torch.load(own, weights_only=False)["a"]
    assert back.placements == tensor.placements
    assert_bitwise(back.full_tensor(), value(), "torch.save")


def test_torch_save_and_load(tmp_path):
    run_ranks(saved_alone, 2, tmp_path)


def test_equal_meshes_of_other_ranks_hold_other_boxes():
    for rank, mesh in each_rank((2,)):
        placed = distribute_tensor(value(), mesh, [RaggedShard((0,), (5, 7))], src_data_rank=None)
        [chunk] = placed.__create_chunk_list__()
        assert tuple(chunk.offsets) == ((0, 0, 0), (5, 0, 0))[rank]
        assert tuple(chunk.sizes) == tuple(placed.to_local().shape)


def test_no_cache_keeps_a_mesh_and_its_process_groups_alive():
    def asked():
        with fake_mesh((2,)) as mesh:
            placement = RaggedShard((0,), (1, 2))
            placed = DTensor.from_local(
                torch.ones(1, 3), mesh, [placement], run_check=False, shape=(3, 3), stride=(3, 1)
            )
            assert placed.__create_chunk_list__()
            assert (placed + placed).to_local().shape == (1, 3)
            return weakref.ref(mesh)

    reference = asked()
    gc.collect()
    assert reference() is None
