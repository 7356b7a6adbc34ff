"""On a simulated accelerator: the bits of the CPU, and no access before a collective is over."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fused_comm import GradReducer, redistribute_many
from fused_comm.ddp import ddp_hook
from fused_comm.redistribute.exchanges import FlatRangeExchange, FlatRangeItem
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
SHAPES = [(8, 4), (5, 3), (7, 2), (3, 2, 2)]


def tensors(device, mesh, placements, *, seed=0):
    """DTensors of random values; those that are Partial differ from rank to rank."""
    shards = [R if isinstance(p, Partial) else p for p in placements]
    found = []
    for number, shape in enumerate(SHAPES):
        torch.manual_seed(100 * seed + number)
        whole = torch.randn(shape)
        local = distribute_tensor(whole.to(device), mesh, shards, src_data_rank=None).to_local()
        if shards != list(placements):
            local = local * (1.1 + dist.get_rank())
        meta = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
        found.append(DTensor.from_local(local, mesh, placements, **meta))
    return found


def reduced(device, shape, placements, target):
    """The sum of the gradients of two backwards, in buckets of 100 bytes; how many buckets."""
    mesh = init_device_mesh(device, shape)
    params = [torch.nn.Parameter(one) for one in tensors(device, mesh, target)]
    reducer = GradReducer(params, bucket_mb=100 / 2**20)
    for step in range(2):
        grads = tensors(device, mesh, placements, seed=1 + step)
        local = [
            (param.to_local(grad_placements=placements) * grad.to_local()).sum()
            for param, grad in zip(params, grads, strict=True)
        ]
        sum(local).backward()
        reducer.finish()
    return [param.grad.to_local().cpu() for param in params], len(reducer.report().buckets)


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [((2,), (P,), (R,)), ((2,), (Partial("avg"),), (R,)), ((2, 2), (P, P), (R, R))],
    ids=str,
)
def test_gradients_have_the_bits_of_the_cpu(shape, source, target):
    def check():
        found, buckets = reduced("sim", shape, source, target)
        expected, _ = reduced("cpu", shape, source, target)
        return all(map(torch.equal, found, expected)), buckets

    for same, buckets in run_sim_ranks(check, torch.Size(shape).numel()):
        assert same
        assert buckets > 1


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_many_tensors_are_redistributed_as_on_the_cpu(shape, async_op):
    def moved(device, mesh, source, target):
        found = redistribute_many(tensors(device, mesh, source), target, async_op=async_op)
        found = found.wait() if async_op else found
        return [one.to_local().cpu() for one in found]

    def check():
        meshes = {device: init_device_mesh(device, shape) for device in ("sim", "cpu")}
        wrong = []
        for source, target in itertools.product((R, P, S0, S1, Partial("avg")), (R, S0, S1)):
            where = [R] * (len(shape) - 1) + [source], [R] * (len(shape) - 1) + [target]
            found, expected = (moved(device, mesh, *where) for device, mesh in meshes.items())
            if not all(map(torch.equal, found, expected)):
                wrong.append((source, target))
        return wrong

    assert run_sim_ranks(check, torch.Size(shape).numel()) == [[]] * torch.Size(shape).numel()


def test_flat_ranges_are_exchanged():
    """What placements such as ragged-shard's need; rank 1 gives four elements to rank 0."""

    def check():
        group, rank = init_device_mesh("sim", (2,)).get_group(), dist.get_rank()
        before, after = (range(5), range(5, 12)), (range(9), range(9, 12))
        local = torch.arange(float(before[rank].start), before[rank].stop).to("sim")
        item = FlatRangeItem(local, before, after, (len(after[rank]),))
        (found,) = FlatRangeExchange([item], group).wait()
        return found.cpu().tolist() == list(after[rank])

    assert run_sim_ranks(check, 2) == [True] * 2


def test_buckets_of_ddp_are_reduced_over_all_axes():
    def gradients(device):
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "cp"))
        torch.manual_seed(0)
        plain = torch.nn.Linear(5, 3).to(device)
        model = DistributedDataParallel(plain, process_group=mesh.get_group("dp"))
        model.register_comm_hook(None, ddp_hook(mesh, op="sum", reduce_dtype=torch.float64))
        torch.manual_seed(1 + dist.get_rank())
        model(torch.randn(2, 5).to(device)).square().sum().backward()
        return [param.grad.cpu() for param in plain.parameters()]

    def check():
        return all(map(torch.equal, gradients("sim"), gradients("cpu")))

    assert run_sim_ranks(check, 4) == [True] * 4
