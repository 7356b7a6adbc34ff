"""Training scripts run as under FSDP2, with the same lines; collectives are counted."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

import fsdp
from fsdp.collectives.reduce_scatter import GroupReduceScatter
from testkit import CommLog, run_ranks
from testkit.models.residual_stack import ResidualBlock, batch, losses, shard, stack

pytestmark = pytest.mark.ranks
BOTH = (fsdp, torch_fsdp)


def _both(world_size, options, *, exact=True, shape=None, names=None, **how):
    """Runs a script with each package on ranks, and compares the results."""

    def check():
        mesh = shape and init_device_mesh("cpu", shape, mesh_dim_names=names)
        given = options | ({"mesh": mesh} if mesh else {})
        return [losses(shard(package, stack(), **given), **how) for package in BOTH]

    for actual, native in run_ranks(check, world_size, timeout=120):
        if exact:
            assert torch.equal(actual, native), (actual, native)
        torch.testing.assert_close(actual, native, rtol=1e-5, atol=1e-6)


def _accumulate(model, last):
    model.set_requires_gradient_sync(last)


def test_gradients_accumulate_without_communication():
    def check():
        model = shard(fsdp, stack(), strategy="native", reshard_after_forward=False)
        model(batch(0)).sum().backward()
        counts = []
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model.set_reshard_after_backward(sync)
            with CommLog() as log:
                model(batch(1)).sum().backward()
            counts.append(log.counts())
        return counts

    for without, with_sync in run_ranks(check, 2):
        assert without == {"all_gather": 4}
        assert with_sync == {"reduce_scatter": 4}


@pytest.mark.parametrize(
    "reduce_dtype", [None, torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_accumulated_gradients_equal_fsdp2(reduce_dtype):
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    exact = reduce_dtype != torch.bfloat16
    if exact:
        _both(2, {"mp_policy": policy}, micro=3, prepare=_accumulate)
        return

    def check():
        model = shard(fsdp, stack(), mp_policy=policy)
        return losses(model, micro=3, prepare=_accumulate)

    def reference():
        return losses(shard(fsdp, stack()), micro=3, prepare=_accumulate)

    for actual, wanted in run_ranks(lambda: (check(), reference()), 2):
        assert not torch.equal(actual, wanted)  # it was bfloat16
        torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.05)


def test_sharded_gradients_accumulate():
    _both(2, {}, micro=3)


def test_mixed_precision_losses_equal_fsdp2():
    _both(2, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)})


def test_outputs_are_cast_as_fsdp2_casts_them():
    def check():
        results = []
        for package in BOTH:
            model, policy = stack(1), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            package.fully_shard(model[0], mp_policy=policy)
            policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
            package.fully_shard(model, mp_policy=policy)
            assert model(batch(0)).dtype == torch.float32
            model.reshard()  # the root stays gathered after forward, for backward
            results.append(losses(model))
        return results

    for actual, native in run_ranks(check, 2):
        assert torch.equal(actual, native)


def test_float16_gradients_are_divided_before_and_after_the_reduction():
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)

    def check():
        model = shard(fsdp, stack(), mp_policy=policy)
        plain = shard(fsdp, stack())
        for one in (model, plain):
            one(batch(0)).square().mean().backward()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad.dtype == torch.float32
            torch.testing.assert_close(
                mine.grad.full_tensor(), wanted.grad.full_tensor(), rtol=1e-2, atol=1e-3
            )

    run_ranks(check, 2)


def test_parameters_and_inputs_have_the_dtypes_of_the_policy():
    def check():
        seen = []
        model = stack(1)
        model[0].up.register_forward_hook(
            lambda m, a, out: seen.append((m.weight.dtype, out.dtype))
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        shard(fsdp, model, mp_policy=policy)
        out = model(batch(0))
        out.sum().backward()
        assert seen == [(torch.bfloat16, torch.bfloat16)]
        assert out.dtype == torch.bfloat16
        for param in model.parameters():
            assert param.dtype == param.grad.dtype == torch.float32

    run_ranks(check, 2)


def test_hsdp_losses_equal_fsdp2():
    _both(4, {}, exact=False, shape=(2, 2), names=("replicate", "shard"))


def test_hsdp_all_reduces_once_and_only_when_required():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = shard(fsdp, stack(), mesh=mesh, strategy="native", reshard_after_forward=False)
        model(batch(0)).sum().backward()
        counts = []
        for everything in (False, True):
            model.set_requires_all_reduce(everything)
            with CommLog() as log:
                model(batch(1)).sum().backward()
            counts.append(log.counts())
        for param in model.parameters():
            assert isinstance(param.placements[0], Replicate)
        return counts

    for without, with_all in run_ranks(check, 4):
        assert without == {"all_gather": 4, "reduce_scatter": 4}
        assert with_all == without | {"all_reduce": 4}


def test_hsdp_accumulates_sharded_gradients_as_fsdp2():
    _both(
        4, {}, exact=False, shape=(2, 2), names=("replicate", "shard"), micro=3, steps=2,
        prepare=lambda model, last: model.set_requires_all_reduce(last),
    )  # fmt: skip


def test_post_accumulate_grad_hooks_run_on_complete_gradients():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        counts = []
        for package in BOTH:
            model, seen = shard(package, stack(1), mesh=mesh), []
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda p, s=seen: s.append(p.grad is None))
            for everything in (False, True):
                model.set_requires_all_reduce(everything)
                model(batch(0)).sum().backward()
                counts.append((len(seen), any(seen)))
        return counts

    for *actual, first, second in run_ranks(check, 4):
        assert actual == [first, second]
        assert actual == [(0, False), (8, False)]


def test_cpu_offload_keeps_shards_and_gradients_on_the_host():
    _both(2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)})


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_gradients_are_clipped_across_groups(clip):
    _both(2, {}, exact=False, clip=clip)


def test_divide_factor_and_sum_only_reductions():
    def prepare(model, last):
        for module in model.modules():
            if isinstance(module, torch_fsdp.FSDPModule):
                module.set_gradient_divide_factor(4.0)
                module.set_force_sum_reduction_for_comms(True)

    _both(2, {}, prepare=prepare)


def test_explicit_prefetch_and_other_settings_do_not_change_losses():
    def prepare(model, last):
        blocks = list(model)[:-1]
        model.set_modules_to_forward_prefetch(blocks[:2])
        blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
        blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
        model.set_is_last_backward(last)
        model.set_reshard_after_forward(True)
        if hasattr(torch_fsdp.FSDPModule, "set_reduce_scatter_max_input_buffers"):  # 2.13
            model.set_reduce_scatter_max_input_buffers(2)

    _both(2, {}, micro=2, prepare=prepare)


def test_explicit_unshard_and_reshard():
    def check():
        model = shard(fsdp, stack(), strategy="native")
        whole = [p.detach() for p in stack()[0].parameters()]
        handle = model[0].unshard(async_op=True)
        assert isinstance(handle, torch_fsdp.UnshardHandle)
        handle.wait()
        for param, wanted in zip(model[0].parameters(), whole, strict=True):
            assert not isinstance(param, DTensor)
            assert torch.equal(param, wanted)
        model[0].reshard()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert model[0].unshard() is None
        with torch.no_grad():
            out = model(batch(0))
        torch.testing.assert_close(out, stack()(batch(0)))

    run_ranks(check, 2)


def test_memory_of_unsharded_parameters_is_freed():
    def check():
        model = shard(fsdp, stack(), reshard_after_forward=True)
        seen = []
        model[1].register_forward_pre_hook(lambda *_: seen.append(model[0].up.weight))
        model(batch(0)).sum().backward()
        assert isinstance(seen[0], DTensor)
        for state in model._get_fsdp_state().context.all_states:
            for group in state.groups:
                assert not group.all_gather._buffer.allocated
                assert not group.reduce_scatter._buffer.allocated
                assert group.params[0].unsharded_param.untyped_storage().nbytes() == 0

    run_ranks(check, 2)


def test_registered_forward_methods_unshard():
    def check():
        class Encoder(ResidualBlock):
            def encode(self, x):
                return self.up(x)

        model = fsdp.fully_shard(nn.Sequential(fsdp.fully_shard(Encoder())))
        fsdp.register_fsdp_forward_method(model[0], "encode")
        model(batch(0)).sum().backward()
        model.zero_grad()
        model[0].encode(batch(0)).sum().backward()
        assert model[0].up.weight.grad is not None
        assert model[0].down.weight.grad is None
        assert isinstance(model[0].up.weight, DTensor)

    run_ranks(check, 2)


def test_keep_unsharded_storage_keeps_addresses():
    def check():
        model = shard(fsdp, stack())
        model.set_keep_unsharded_storage(True)
        wanted = losses(shard(fsdp, stack()))
        assert torch.equal(losses(model), wanted)
        groups = [g for state in model._get_fsdp_state().context.all_states for g in state.groups]
        addresses = [group.params[0].unsharded_param.data_ptr() for group in groups]
        assert all(addresses)
        assert torch.equal(losses(model, steps=1), losses(model, steps=1)) is False
        assert [group.params[0].unsharded_param.data_ptr() for group in groups] == addresses

    run_ranks(check, 2)


def test_gradients_are_reduced_in_the_memory_of_the_parameters():
    """At the peak of a step there are no unsharded parameters and no other gradient buffer."""

    def check():
        model, seen = shard(fsdp, stack()), []
        model(batch(0)).sum().backward()
        groups = [g for state in model._get_fsdp_state().context.all_states for g in state.groups]
        copy_in = GroupReduceScatter.copy_in

        def observed(self, memory):
            (group,) = [group for group in groups if group.reduce_scatter is self]
            buffers = [group.reduce_scatter._buffer.allocated for group in groups]
            unsharded_param = group.params[0].unsharded_param
            address = unsharded_param.data_ptr()
            seen.append((group.is_unsharded, any(buffers)))
            copy_in(self, memory)
            assert self._buffer.local.data_ptr() == address

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GroupReduceScatter, "copy_in", observed)
            model(batch(0)).sum().backward()
        assert seen == [(False, False)] * 4
        assert not any(group.reduce_scatter._buffer.allocated for group in groups)

    run_ranks(check, 2)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda model: model.set_requires_gradient_sync(False),
        lambda model: model.set_keep_unsharded_storage(True),
        lambda model: model.set_reshard_after_backward(False),
    ],
    ids=["accumulated", "kept", "not resharded"],
)
def test_gradients_have_memory_of_their_own_where_parameters_need_theirs(prepare):
    def check():
        model = shard(fsdp, stack())
        prepare(model)
        model(batch(0)).sum().backward()
        for state in model._get_fsdp_state().context.all_states:
            for group in state.groups:
                memory = group.reduce_scatter._buffer.memory
                assert memory is not group.all_gather.memory

    run_ranks(check, 2)


def test_gradients_that_are_added_to_earlier_ones_leave_no_memory_of_parameters():
    def check():
        model = shard(fsdp, stack())
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(batch(0)).sum().backward()
        states = model._get_fsdp_state().context.all_states
        params = [group.params[0].unsharded_param for state in states for group in state.groups]
        return [param.untyped_storage().nbytes() for param in params]

    assert run_ranks(check, 2) == [[0] * 4] * 2
