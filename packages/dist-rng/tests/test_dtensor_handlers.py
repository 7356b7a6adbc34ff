"""Modules, autograd and errors: what random operators on DTensors do besides their values.

The values are compared in test_dtensor_values.py. Every rank's part is computed in its own turn on
a fake mesh: nothing communicates, so nothing is missing. Operators that do communicate by design
run on real ranks in test_dtensor_ranks.py.
"""

from functools import partial

import pytest
import torch
import torch.distributed.tensor as dt
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

import dist_rng
from dist_rng import Geometry, Region, single_device_rng
from dist_rng.emulation.device import emulated_device
from dist_rng.regions.placements import slice_of
from testkit import (
    FLATTENS_TWO_SHARDED_DIMS,
    NO_FLATTENING,
    CommLog,
    assert_bitwise,
    each_rank,
    fake_mesh,
)

S, R = Shard, Replicate()


@pytest.fixture(autouse=True)
def _installed():
    dist_rng.install()
    yield
    dist_rng.uninstall()


WITH_GENERATOR = {
    "uniform_": lambda x, g: x.clone().uniform_(generator=g),
    "normal_": lambda x, g: x.clone().normal_(generator=g),
    "exponential_": lambda x, g: x.clone().exponential_(generator=g),
    "cauchy_": lambda x, g: x.clone().cauchy_(generator=g),
    "geometric_": lambda x, g: x.clone().geometric_(0.3, generator=g),
    "log_normal_": lambda x, g: x.clone().log_normal_(generator=g),
    "random_": lambda x, g: x.clone().random_(generator=g),
    "random_ to": lambda x, g: x.clone().random_(9, generator=g),
    "bernoulli_": lambda x, g: x.clone().bernoulli_(0.3, generator=g),
    "bernoulli_ from tensor": lambda x, g: x.clone().bernoulli_(x, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x, generator=g),
    "bernoulli of p": lambda x, g: torch.bernoulli(x, 0.3, generator=g),
    "rand_like": lambda x, g: torch.rand_like(x, generator=g),
    "randn_like": lambda x, g: torch.randn_like(x, generator=g),
    "randint_like": lambda x, g: torch.randint_like(x, 9, generator=g),
    "randint_like low": lambda x, g: torch.randint_like(x, 3, 9, generator=g),
    "normal of means": lambda x, g: torch.normal(x, 1.0, generator=g),
    "normal of stds": lambda x, g: torch.normal(1.0, x, generator=g),
    "normal of both": lambda x, g: torch.normal(x, x, generator=g),
}


@pytest.mark.parametrize("draw", WITH_GENERATOR.values(), ids=WITH_GENERATOR.keys())
def test_an_explicit_generator_is_used_and_the_default_not_advanced(draw):
    full = torch.linspace(0, 1, 9)
    single = torch.Generator().manual_seed(3)
    expected = draw(full, single)
    for _, mesh in each_rank((2,)):
        generator = torch.Generator().manual_seed(3)
        before = torch.get_rng_state()
        dtensor = distribute_tensor(full, mesh, [S(0)], src_data_rank=None)
        result = draw(dtensor, generator)
        assert_bitwise(result._local_tensor, slice_of(expected, Region.of(result)))
        assert torch.equal(generator.get_state(), single.get_state())
        assert torch.equal(torch.get_rng_state(), before)


def test_modules_initialized_from_the_meta_device():
    def build():
        return nn.Sequential(
            nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 4), nn.Embedding(7, 5)
        )

    torch.manual_seed(2)
    expected, state = build(), torch.get_rng_state()
    for _, mesh in each_rank((2, 2)):
        with torch.device("meta"):
            model = build()
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                placements = (S(0), S(parameter.ndim - 1))
                sharded = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
                setattr(module, name, nn.Parameter(sharded))
        torch.manual_seed(9)
        model[0].reset_parameters()  # on meta nothing is drawn, as on one device
        torch.manual_seed(2)
        model.to_empty(device="cpu")
        for module in model:
            module.reset_parameters()
        for (name, actual), wanted in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            part = slice_of(wanted.detach(), Region.of(actual))
            assert_bitwise(actual.detach()._local_tensor, part, name)
        assert torch.equal(torch.get_rng_state(), state)


def test_activation_checkpointing_draws_the_mask_again():
    def loss_and_gradient(x, inside):
        x = x.detach().requires_grad_()
        torch.manual_seed(4)
        block = lambda t: F.dropout(t.sin(), 0.5) * t
        y = checkpoint(block, x, use_reentrant=False) if inside else block(x)
        y.backward(torch.ones_like(y))
        return y.detach(), x.grad

    full = torch.linspace(0, 1, 30).view(6, 5)
    wanted = loss_and_gradient(full, inside=False)
    for _, mesh in each_rank((2,)):
        dtensor = distribute_tensor(full, mesh, [S(0)], src_data_rank=None)
        for actual, expected in zip(loss_and_gradient(dtensor, inside=True), wanted, strict=True):
            assert_bitwise(actual._local_tensor, slice_of(expected, Region.of(actual)))


def test_native_dropout_has_the_gradient_of_its_mask():
    full = torch.linspace(1, 2, 20).view(5, 4)
    with fake_mesh((2,), rank=1) as mesh:
        x = distribute_tensor(full, mesh, [S(0)], src_data_rank=None).requires_grad_()
        y, mask = torch.native_dropout(x, 0.5, True)
        y.backward(torch.ones_like(y))
        assert_bitwise(x.grad._local_tensor, mask._local_tensor.float() * 2)


flattens_by_head = pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)


@pytest.mark.parametrize(
    "placements",
    [
        pytest.param((S(0), R), id="by batch"),
        pytest.param((S(0), S(0)), id="by batch twice", marks=pytest.mark.slow),
        pytest.param((R, S(1)), id="by head", marks=flattens_by_head),
        # Torch's search for a redistribution of dims on two axes takes most of a minute.
        pytest.param(
            (S(0), S(1)), id="by batch and head", marks=(flattens_by_head, pytest.mark.slow)
        ),
        pytest.param(
            (S(1), S(0)), id="by head and batch", marks=(flattens_by_head, pytest.mark.slow)
        ),
        pytest.param((R, R), id="replicas"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_on_the_cpu_draws_one_devices_mask(placements, causal):
    generator = torch.Generator().manual_seed(1)
    heads = [torch.randn(4, 4, 6, 8, generator=generator) for _ in range(3)]
    attend = partial(F.scaled_dot_product_attention, dropout_p=0.3, is_causal=causal)
    torch.manual_seed(0)
    expected, state = attend(*heads), torch.get_rng_state()
    for _, mesh in each_rank((2, 2)):
        sharded = [distribute_tensor(x, mesh, placements, src_data_rank=None) for x in heads]
        torch.manual_seed(0)
        with implicit_replication():  # torch makes the causal mask a plain tensor
            result = attend(*sharded)
        assert result.placements == placements
        assert_bitwise(result._local_tensor, slice_of(expected, Region.of(result)))
        assert torch.equal(torch.get_rng_state(), state)


ON_GATHERED = {
    "poisson": lambda x: torch.poisson(x),
    "multinomial": lambda x: torch.multinomial(x, 3),
}


@pytest.mark.parametrize("draw", ON_GATHERED.values(), ids=ON_GATHERED.keys())
def test_operators_on_gathered_inputs_do_not_communicate_on_replicas(draw):
    full = torch.linspace(0.5, 9, 36).view(4, 9)
    torch.manual_seed(0)
    expected, state = draw(full), torch.get_rng_state()
    for _, mesh in each_rank((2, 2)):
        torch.manual_seed(0)
        with CommLog() as log:
            result = draw(distribute_tensor(full, mesh, [R, R], src_data_rank=None))
        log.assert_counts({})
        assert result.placements == (R, R)
        assert_bitwise(result._local_tensor, expected)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", ON_GATHERED.values(), ids=ON_GATHERED.keys())
def test_operators_on_gathered_inputs_refuse_partial_ones_and_ranks_outside_the_mesh(draw):
    with fake_mesh((2,)) as mesh:
        partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
        before = torch.get_rng_state()
        with pytest.raises(ValueError, match="whose local values are summands; redistribute it"):
            draw(partial)
        assert torch.equal(torch.get_rng_state(), before)
    with fake_mesh((4,), rank=3):
        others = DeviceMesh("cpu", [0, 1])
        x = DTensor.from_local(torch.ones(2, 4), others, [S(0)], run_check=False)
        with pytest.raises(ValueError, match="call it on the ranks of the mesh"):
            draw(x)


@pytest.mark.parametrize(
    ("operate", "message"),
    [
        (lambda x: x.uniform_(), r"aten\.uniform_\.default: .*redistribute it"),
        (torch.rand_like, r"aten\.rand_like\.default: .*redistribute it"),
        (torch.bernoulli, r"aten\.bernoulli\.default: .*redistribute it"),
    ],
)
def test_the_error_for_a_partial_placement_names_operator_and_remedy(operate, message):
    with fake_mesh((2,)) as mesh:
        partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
        with pytest.raises(ValueError, match=message):
            operate(partial)


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: torch.binomial(x, x),
        lambda x: F.rrelu(x, training=True),
        lambda x: torch.ops.aten.geometric(x, 0.3),
    ],
)
def test_operators_that_are_not_reproduced_raise_and_draw_nothing(operate):
    with fake_mesh((2,)) as mesh:
        dtensor = distribute_tensor(torch.ones(4, 4), mesh, [S(0)], src_data_rank=None)
        before = torch.get_rng_state()
        with pytest.raises(ValueError, match="dist-rng does not reproduce this operator's stream"):
            operate(dtensor)
        assert torch.equal(torch.get_rng_state(), before)


ON_CPUS_ONLY = {
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "log_normal_": lambda x: x.log_normal_(),
}


@pytest.mark.parametrize(
    "draw", (ON_CPUS_ONLY | ON_GATHERED).values(), ids=[*ON_CPUS_ONLY, *ON_GATHERED]
)
def test_operators_of_cpus_raise_where_a_gpu_is_emulated_and_draw_nothing(draw):
    plain = torch.ones(4, 4)
    with fake_mesh((2,)) as mesh:
        sharded = distribute_tensor(plain, mesh, [S(0)], src_data_rank=None)
        for emulation, x in [
            (single_device_rng(geometry=Geometry.H100), plain),
            (single_device_rng(geometry=Geometry.H100), sharded),
            (emulated_device(Geometry.H100), sharded),
        ]:
            with emulation:
                before = torch.get_rng_state()
                with pytest.raises(ValueError, match="does not reproduce this operator's stream"):
                    draw(x)
                assert torch.equal(torch.get_rng_state(), before)


def test_probabilities_with_other_placements_raise():
    with fake_mesh((2,)) as mesh:
        dtensor = distribute_tensor(torch.ones(4, 4), mesh, [S(0)], src_data_rank=None)
        placed = distribute_tensor(torch.ones(4, 4), mesh, [S(1)], src_data_rank=None)
        shaped = distribute_tensor(torch.ones(2, 4), mesh, [S(0)], src_data_rank=None)
        for other in (placed, shaped, torch.ones(4, 4)):
            with pytest.raises(ValueError, match=r"aten\.bernoulli_.*placements"):
                dtensor.bernoulli_(other)


def test_invalid_standard_deviations_raise_and_draw_nothing():
    with fake_mesh((2,)) as mesh:
        mean = distribute_tensor(torch.ones(4, 4), mesh, [S(0)], src_data_rank=None)
        stds = distribute_tensor(torch.ones(3, 4, 4), mesh, [R], src_data_rank=None)
        negative = distribute_tensor(-torch.eye(4), mesh, [S(0)], src_data_rank=None)
        before = torch.get_rng_state()
        with pytest.raises(ValueError, match=r"got \(3, 4, 4\); expand mean"):
            torch.normal(mean, stds)
        for draw in (lambda: torch.normal(mean, negative), lambda: torch.normal(1.0, negative)):
            with pytest.raises(ValueError, match="standard deviations >= 0"):
                draw()
        assert torch.equal(torch.get_rng_state(), before)


def test_a_mean_of_more_dims_than_std():
    mean, std = torch.linspace(-1, 1, 20).view(5, 4), torch.linspace(0, 3, 4)
    torch.manual_seed(0)
    expected = torch.normal(mean, std)
    for _, mesh in each_rank((2,)):
        means = distribute_tensor(mean, mesh, [S(0)], src_data_rank=None)
        stds = distribute_tensor(std, mesh, [R], src_data_rank=None)
        torch.manual_seed(0)
        result = torch.normal(means, stds)
        assert_bitwise(result._local_tensor, slice_of(expected, Region.of(result)))


def test_normals_of_meta_tensors_draw_nothing():
    with fake_mesh((2,)) as mesh, torch.device("meta"):
        x = distribute_tensor(torch.ones(4, 4), mesh, [S(0)], src_data_rank=None)
        before = torch.get_rng_state()
        assert torch.normal(x, x)._local_tensor.is_meta
        assert torch.equal(torch.get_rng_state(), before)


def test_fake_tensors_draw_nothing():
    fake = FakeTensorMode()
    with fake_mesh((2,)) as mesh:
        with fake:
            local = torch.ones(2, 4)
        x = DTensor.from_local(local, mesh, [S(0)], run_check=False)
        before = torch.get_rng_state()
        assert isinstance(x.uniform_()._local_tensor, FakeTensor)
        assert torch.normal(x, x).shape == (4, 4)
        assert F.dropout(x, 0.5).shape == (4, 4)
        assert torch.equal(torch.get_rng_state(), before)


def test_initializers_of_global_matrices_draw_nothing_on_meta():
    with fake_mesh((2,)) as mesh:
        x = distribute_tensor(torch.empty(6, 4, device="meta"), mesh, [S(0)], src_data_rank=None)
        before = torch.get_rng_state()
        assert nn.init.orthogonal_(x)._local_tensor.is_meta
        assert torch.equal(torch.get_rng_state(), before)


def test_trunc_normal_of_a_replica_does_not_communicate_or_patch_any():
    torch.manual_seed(0)
    expected = nn.init.trunc_normal_(torch.zeros(9, 5), a=-0.5, b=0.5)
    for _, mesh in each_rank((2,)):
        replica = distribute_tensor(torch.zeros(9, 5), mesh, [R], src_data_rank=None)
        torch.manual_seed(0)
        with CommLog() as log:
            nn.init.trunc_normal_(replica, a=-0.5, b=0.5)
        log.assert_counts({})
        assert_bitwise(replica._local_tensor, expected)
        assert torch.ops.aten.any.default not in DTensor._op_dispatcher._custom_op_handlers


def test_factories_that_draw_nothing_call_torch():
    with fake_mesh((2,)) as mesh:
        assert_bitwise(dt.ones(4, device_mesh=mesh, placements=[S(0)])._local_tensor, torch.ones(2))


def test_uninstall_restores_earlier_handlers():
    table = DTensor._op_dispatcher._custom_op_handlers
    dist_rng.uninstall()
    table[torch.ops.aten.uniform_.default] = there = lambda *_: None
    try:
        dist_rng.install()
        assert table[torch.ops.aten.uniform_.default] is not there
        dist_rng.uninstall()
        assert table[torch.ops.aten.uniform_.default] is there
    finally:
        del table[torch.ops.aten.uniform_.default]


def test_generators_are_compared_between_install_with_the_check_and_uninstall():
    from dist_rng.dtensor.agreement import first_draw_check

    dist_rng.install(check_generators=True)
    assert first_draw_check.enabled
    dist_rng.uninstall()
    assert not first_draw_check.enabled


def test_uninstall_restores_torch_and_install_may_be_called_twice():
    table = DTensor._op_dispatcher._custom_op_handlers
    import torch.distributed.tensor._api as api

    with_handlers = dict(table)
    dist_rng.install()
    assert dict(table) == with_handlers
    dist_rng.uninstall()
    assert not dist_rng.is_installed()
    assert torch.ops.aten.uniform_.default not in table
    assert torch.ops.aten.argmin.default in table
    assert api._dtensor_init_helper.__module__ == "torch.distributed.tensor._api"
    assert nn.init.orthogonal_.__module__ == "torch.nn.init"
    dist_rng.uninstall()
    dist_rng.install()
    assert dict(table).keys() == with_handlers.keys()
