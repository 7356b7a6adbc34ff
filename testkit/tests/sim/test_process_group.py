"""Collectives of the device have gloo's results, and are ordered as NCCL's."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from testkit import models
from testkit.sim.races import RaceChecker, RaceError
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks


def collectives(device):
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(8.0).add(rank).to(device)
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        results.append(x.clone())
        dist.all_reduce(results[-1], op)
    results.append(x.clone())
    dist.broadcast(results[-1], 1)
    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    gathered = functional.all_gather_into_tensor(x, size, group)
    reduced = functional.reduce_scatter_tensor(x, "sum", size, group)
    results += map(functional.wait_tensor, (gathered, reduced))
    results.append(torch.empty_like(x))
    dist.all_to_all_single(results[-1], x)
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x)
    results += parts
    received = torch.empty_like(x)
    exchange = [
        dist.P2POp(dist.isend, x, 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    dist.barrier()
    return [result.cpu() for result in [*results, received]]


def test_collectives_have_the_results_of_gloo():
    def check():
        expected, found = collectives("cpu"), collectives("sim")
        average = torch.full((4,), float(dist.get_rank()), device="sim")
        dist.all_reduce(average, dist.ReduceOp.AVG)
        uneven = [torch.empty(4, device="sim"), torch.empty(3, device="sim")]
        with pytest.raises(RuntimeError, match="expected tensors of 4 elements, as NCCL"):
            dist.all_gather(uneven, average)
        return all(map(torch.equal, found, expected)), average.cpu().tolist(), len(found)

    assert run_sim_ranks(check, 2) == [(True, [0.5] * 4, 9)] * 2


@pytest.mark.parametrize("waits", [True, False])
def test_a_result_that_is_read_before_the_wait_is_a_race(waits):
    def check():
        x = torch.ones(8, device="sim")
        try:
            with RaceChecker():
                work = dist.all_reduce(x, async_op=True)
                if waits:
                    work.wait()
                x.sum()
        except RaceError as error:
            return [(race.earlier.op, race.later.op) for race in error.races]
        finally:
            work.wait()
        return []

    wanted = [] if waits else [("allreduce", "aten::sum")]
    assert run_sim_ranks(check, 2, races=False) == [wanted] * 2


def test_fsdp2_trains_with_the_bits_of_the_cpu_and_without_a_race():
    def train(device):
        mesh = init_device_mesh(device, (2,))
        model = models.llama(num_hidden_layers=2).to(device)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        torch.manual_seed(dist.get_rank())
        losses = []
        for _ in range(3):
            ids = torch.randint(0, models.VOCABULARY, (2, 8)).to(device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def check():
        expected = train("cpu")
        with RaceChecker() as checker:
            found = train("sim")
        return found == expected, checker.accesses > 1000

    assert run_sim_ranks(check, 2, races=False, timeout=120) == [(True, True)] * 2


def test_what_follows_a_future_waits_for_its_collective():
    """As a hook of DistributedDataParallel does, which reads the result by `then`."""

    def check():
        x = torch.ones(8, device="sim")
        future = dist.all_reduce(x, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 2).wait().tolist()

    assert run_sim_ranks(check, 2) == [[4.0] * 8] * 2
