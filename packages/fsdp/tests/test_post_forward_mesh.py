"""reshard_after_forward as a number: backward gathers over so many neighbours, to the same bits."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import Rows
from testkit import CommLog, run_ranks
from testkit.models.residual_stack import batch, losses, shard, stack

pytestmark = pytest.mark.ranks


def test_backward_gathers_over_the_post_forward_mesh():
    def check():
        wanted = losses(shard(fsdp, stack(), strategy="native"))
        model = shard(fsdp, stack(), reshard_after_forward=2, strategy="native")
        assert torch.equal(losses(model), wanted)
        with CommLog() as log:
            model(batch(0)).sum().backward()
        gathers = [call for call in log.calls if call.op == "all_gather"]
        # all four groups are gathered by all ranks and then by two
        return [call.output_bytes // call.input_bytes for call in gathers]

    for ranks in run_ranks(check, 4, timeout=120):
        assert sorted(ranks) == [2, 2, 2, 2, 4, 4, 4, 4]


@pytest.mark.parametrize("keeps", [pytest.param(False, marks=pytest.mark.slow), True])
def test_set_reshard_after_forward_replaces_the_number(keeps):
    def check():
        model = shard(fsdp, stack(), reshard_after_forward=2, strategy="native")
        first = model(batch(0))
        model.set_reshard_after_forward(True)  # what forward has kept is let go
        model.set_keep_unsharded_storage(keeps)
        first.sum().backward()
        wanted = losses(shard(fsdp, stack(), strategy="native"))
        model.zero_grad()
        assert torch.equal(losses(model), wanted)
        with CommLog() as log:
            model(batch(0)).sum().backward()
        gathers = [call for call in log.calls if call.op == "all_gather"]
        return {call.output_bytes // call.input_bytes for call in gathers}

    assert run_ranks(check, 4, timeout=120) == [{4}] * 4


@pytest.mark.parametrize("keeps", [pytest.param(False, marks=pytest.mark.slow), True])
def test_memory_of_unsharded_parameters_stays_beside_the_post_forward_shards(keeps):
    """As in torch 2.15: both options are in effect, and addresses stay."""

    def check():
        wanted = losses(shard(fsdp, stack(), strategy="native"))
        model = shard(fsdp, stack(), reshard_after_forward=2, strategy="native")
        model.set_keep_unsharded_storage(keeps)
        assert torch.equal(losses(model), wanted)
        (group,) = model[0]._get_fsdp_state().groups
        unsharded = group.params[0].unsharded_param
        sizes, addresses = [], set()
        model[0].up.register_forward_hook(lambda *_: addresses.add(unsharded.data_ptr()))
        with CommLog() as log:
            out = model(batch(0))
            sizes.append(unsharded.untyped_storage().nbytes())
            assert group.all_gather._post_forward.is_filled
            out.sum().backward()
            sizes.append(unsharded.untyped_storage().nbytes())
        gathers = [call for call in log.calls if call.op == "all_gather"]
        ranks = sorted(call.output_bytes // call.input_bytes for call in gathers)
        assert ranks == [2] * 4 + [4] * 4
        assert all(isinstance(param, DTensor) for param in model.parameters())
        for _ in range(2):
            model(batch(1)).sum().backward()
        model.set_keep_unsharded_storage(False)
        model(batch(1)).sum().backward()
        sizes.append(unsharded.untyped_storage().nbytes())
        return [size > 0 for size in sizes], len(addresses) == 1 or not keeps

    assert run_ranks(check, 4, timeout=120) == [([keeps, keeps, False], True)] * 4


def test_losses_are_the_same_for_granularities_and_strategies():
    def check():
        options = {"shard_placement_fn": lambda p: Rows(3) if p.ndim == 2 else None}
        for strategy in ("native", "exchange"):
            wanted = losses(shard(fsdp, stack(), strategy=strategy, **options))
            model = shard(fsdp, stack(), reshard_after_forward=2, strategy=strategy, **options)
            assert torch.equal(losses(model), wanted)

    run_ranks(check, 4, timeout=120)


def test_modules_have_sharded_parameters_between_forward_and_backward():
    def check():
        model = shard(fsdp, stack(), reshard_after_forward=2)
        own = [group.shard for group in model[0]._get_fsdp_state().groups]
        out = model(batch(0))
        assert [p.device_mesh.size() for p in model[0].parameters()] == [4] * 6
        cache = model[0]._get_fsdp_state().groups[0].all_gather._post_forward
        assert cache.is_filled
        assert cache.shard.nbytes == 2 * own[0].nbytes  # half of all, where a shard is a quarter
        assert not cache.buffer.allocated
        out.sum().backward()
        assert not cache.is_filled
        assert not cache.shard.allocated
        with torch.no_grad():
            model(batch(0))
        assert not cache.is_filled  # there will be no backward
        model(batch(0))
        model[0].reshard()
        assert not cache.is_filled

    run_ranks(check, 4, timeout=120)


def test_forward_gathers_changed_parameters():
    """A forward gathers from the shards, whatever an earlier one has kept."""

    def check():
        model = shard(fsdp, stack(), reshard_after_forward=2)
        model(batch(0))
        cache, seen = model[0]._get_fsdp_state().groups[0].all_gather._post_forward, []
        model[0].up.register_forward_hook(lambda *_: seen.append(cache.is_filled))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        other = stack()
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(0.5)
        assert torch.allclose(model(batch(1)), other(batch(1)))
        assert seen == [False]  # the memory of what was kept is back by then

    run_ranks(check, 4, timeout=120)


def test_checkpointing_and_several_forwards_before_backward():
    def check():
        results = []
        for reshard in (2, True):
            model = shard(fsdp, stack(), reshard_after_forward=reshard)
            first = model[0]
            x = batch(0).requires_grad_()
            y = checkpoint(model, x, use_reentrant=False).sum()
            (y + model(batch(1)).sum() + first(first(batch(2))).sum()).backward()
            results.append([x.grad, *(param.grad.full_tensor() for param in model.parameters())])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))

    run_ranks(check, 4, timeout=120)


def test_number_of_all_ranks_is_true_and_of_one_rank_is_false():
    def check():
        wanted = losses(shard(fsdp, stack()))
        assert torch.equal(losses(shard(fsdp, stack(), reshard_after_forward=2)), wanted)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = shard(fsdp, stack(), reshard_after_forward=1, strategy="native")
        assert any("keeps all parameters" in str(one.message) for one in caught)
        assert torch.equal(losses(model), wanted)
        with CommLog() as log:
            model(batch(0)).sum().backward()
        log.assert_counts({"all_gather": 4, "reduce_scatter": 4})

    run_ranks(check, 2)


def test_hsdp_losses_are_the_same():
    def check():
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
        wanted = losses(shard(fsdp, stack(), mesh=mesh))
        model = shard(fsdp, stack(), mesh=mesh, reshard_after_forward=2)
        assert torch.equal(losses(model), wanted)

    run_ranks(check, 4, timeout=120)
