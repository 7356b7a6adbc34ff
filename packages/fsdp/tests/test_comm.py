"""Custom collectives, process-group memory and separate groups: training stays the same."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp._compat import AllGather, ReduceScatter
from testkit import CommLog, run_ranks
from testkit.models.residual_stack import batch, losses, shard, stack
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks
# Since 2.13 the old names warn.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Memory:
    """Counts calls and their groups, and allocates as torch's default does."""

    def __init__(self):
        self.calls, self.groups = 0, set()

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Memory, AllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        self.groups.add(group)
        return ALL_GATHER(output_tensor, input_tensor, group, async_op=async_op)


class Reduce(Memory, ReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        self.groups.add(group)
        return REDUCE_SCATTER(output_tensor, input_tensor, op, group)  # None: it has ended


def _set_custom(model):
    gather, reduce = Gather(), Reduce()
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
    return gather, reduce


def test_custom_collectives_on_a_simulated_device_give_the_losses_of_the_cpu():
    """The memory that they allocate is used and freed on the streams that allocated it."""

    def check():
        model = shard(fsdp, stack().to("sim"), mesh=init_device_mesh("sim", (2,)))
        gather, reduce = _set_custom(model)
        found = losses(model, device="sim", make_optimizer=_foreach).tolist()
        host = shard(fsdp, stack(), mesh=init_device_mesh("cpu", (2,)), strategy="native")
        wanted = losses(host, make_optimizer=_foreach).tolist()
        return found == wanted, gather.calls, reduce.calls

    assert run_sim_ranks(check, 2) == [(True, 4 * 7, 4 * 4)] * 2


def _foreach(model):
    """A device's default, which the CPU's is not."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def test_custom_collectives_give_the_same_losses():
    def check():
        wanted = losses(shard(fsdp, stack()))
        model = shard(fsdp, stack())
        gather, reduce = _set_custom(model)
        assert torch.equal(losses(model, steps=4), wanted)
        # three blocks gathered twice, the root once, and each reduced, in each of four steps
        assert (gather.calls, reduce.calls) == (4 * 7, 4 * 4)

    run_ranks(check, 2)


def test_custom_collectives_may_be_set_between_steps():
    def check():
        model = shard(fsdp, stack())
        model(batch(0)).sum().backward()
        before = [param.grad.full_tensor() for param in model.parameters()]
        gather, reduce = _set_custom(model)
        model.zero_grad()
        model(batch(0)).sum().backward()
        assert (gather.calls, reduce.calls) == (7, 4)
        for param, wanted in zip(model.parameters(), before, strict=True):
            assert torch.equal(param.grad.full_tensor(), wanted)

    run_ranks(check, 2)


def test_process_group_memory_gives_the_same_losses():
    def check():
        wanted = losses(shard(fsdp, stack()))
        model = shard(fsdp, stack())
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
        with CommLog() as log:
            assert torch.equal(losses(model, steps=4), wanted)
        # the all-reduce compares the ranks' plans
        log.assert_counts({"all_gather": 28, "reduce_scatter": 16, "all_reduce": 1})
        for enable in (True, False):  # again, and no longer
            model.set_allocate_memory_from_process_group_for_comm(enable)

    run_ranks(check, 2)


def test_reduce_scatters_use_a_separate_process_group():
    def check():
        wanted = losses(shard(fsdp, stack()))
        for strategy in ("native", "exchange"):
            model = shard(fsdp, stack(), strategy=strategy)
            model.set_separate_reduce_scatter_group()
            groups = {
                group.collectives.reduce_group
                for module in model.modules()
                if isinstance(module, fsdp.FSDPModule)
                for group in module._get_fsdp_state().groups
            }
            assert len(groups) == 1  # one for all
            assert groups != {dist.group.WORLD}
            assert torch.equal(losses(model), wanted)
            for enable, used in ((True, groups), (False, None)):
                model.set_separate_reduce_scatter_group(enable)
                gather, reduce = _set_custom(model)
                losses(model, steps=1)
                assert groups.isdisjoint(gather.groups)
                assert (reduce.groups == gather.groups) is (used is None)

    run_ranks(check, 2)


def test_disabling_process_group_memory_keeps_a_custom_all_gather():
    def check():
        model = shard(fsdp, stack())
        modules = [one for one in model.modules() if isinstance(one, fsdp.FSDPModule)]
        for one in modules:
            one.set_allocate_memory_from_process_group_for_comm(True)
            one.set_custom_all_gather(Gather())
            one.set_allocate_memory_from_process_group_for_comm(False)
        with CommLog() as log:
            losses(model, steps=1)
        # reductions are the strategy's again, which on gloo sends and receives
        assert log.counts()["all_gather"] == 7
        assert log.counts()["send"] == 4
        assert "reduce_scatter" not in log.counts()

    run_ranks(check, 2)


def test_process_group_memory_is_refused_beside_custom_collectives_and_exchange():
    def check():
        model = shard(fsdp, stack())
        model.set_custom_all_gather(Gather())
        with pytest.raises(ValueError, match="Gather were set by set_custom_all_gather"):
            model.set_allocate_memory_from_process_group_for_comm(True)
        model.set_allocate_memory_from_process_group_for_comm(False)  # is so already
        exchanged = shard(fsdp, stack(), strategy="exchange")
        with pytest.raises(ValueError, match="got 'exchange'"):
            exchanged.set_allocate_memory_from_process_group_for_comm(True)
        with pytest.raises(RuntimeError, match=r"symmetric memory; '3.weight'.* are on cpu"):
            model.set_symm_mem_for_comm()

    run_ranks(check, 1)
