"""Random operators on DTensors give one device's values and leave its generator state.

Every rank's part is computed in its own turn on a fake mesh: nothing communicates, so nothing is
missing. Operators that do communicate by design run on real ranks in test_dtensor_ranks.py.
"""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

import dist_rng
from dist_rng.placement import region_of, slice_of
from testkit import CommLog, assert_bitwise, each_rank, fake_mesh

S, R = Shard, Replicate()


@pytest.fixture(autouse=True)
def _installed():
    dist_rng.install()
    yield
    dist_rng.uninstall()


# What is drawn from an (m, n) float tensor; each gives a tensor of one device and of the mesh.
OPERATORS = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ from tensor": lambda x: x.bernoulli_(x.sigmoid()),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of p": lambda x: torch.bernoulli(x, 0.3),
    "exponential_": lambda x: x.exponential_(2.0),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(9),
    "random_ from to": lambda x: x.random_(3, 9),
    "rand_like": torch.rand_like,
    "rand_like f64": lambda x: torch.rand_like(x, dtype=torch.float64),
    "rand_like of a transpose": lambda x: torch.rand_like(x.t()),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 7),
    "randint_like low": lambda x: torch.randint_like(x, -3, 7, dtype=torch.int32),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of stds": lambda x: torch.normal(1.0, x.abs()),
    "normal of both": lambda x: torch.normal(x, x.abs()),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "dropout of everything": lambda x: F.dropout(x, 1.0),
    "dropout off": lambda x: F.dropout(x, 0.4, training=False),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature dropout": lambda x: torch.feature_dropout(x.unsqueeze(-1), 0.4, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "orthogonal_": lambda x: nn.init.orthogonal_(x),
    "orthogonal_ wide": lambda x: nn.init.orthogonal_(x.t()),
    "sparse_": lambda x: nn.init.sparse_(x, 0.2),
    "new_empty": lambda x: x.new_empty(5, 4).normal_(),
}
PLACEMENTS = [
    ((1,), (S(0),)),
    ((3,), (S(0),)),
    ((8,), (S(0),)),
    ((2,), (S(1),)),
    ((4,), (R,)),
    ((2, 2), (S(0), S(1))),
    ((2, 2), (S(1), S(0))),
    ((2, 2), (S(0), S(0))),
    ((2, 3), (R, S(1))),
    ((2, 2, 2), (S(0), R, S(0))),
]


def one_device(operate, full):
    torch.manual_seed(5)
    torch.randn(3)  # not at the start of the stream, and with a second sample in store
    result = operate(full.clone())
    return result, torch.get_rng_state()


def assert_equals_one_device(operate, full, mesh, placements, what):
    expected, state = one_device(operate, full)
    dtensor = distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)
    torch.manual_seed(5)
    torch.randn(3)
    with CommLog() as log:
        result = operate(dtensor)
    log.assert_counts({})
    assert isinstance(result, DTensor)
    assert (result.shape, result.stride()) == (expected.shape, expected.stride()), what
    local = result._local_tensor.flatten()
    assert_bitwise(local, slice_of(expected, region_of(result)).flatten(), what)
    assert torch.equal(torch.get_rng_state(), state), f"{what}: the generator differs"


@pytest.mark.parametrize(("mesh_shape", "placements"), PLACEMENTS, ids=str)
def test_operators_on_every_placement(mesh_shape, placements):
    full = torch.linspace(-2, 2, 42).view(6, 7)
    for rank, mesh in each_rank(mesh_shape):
        for name, operate in OPERATORS.items():
            assert_equals_one_device(operate, full, mesh, placements, f"{name} on rank {rank}")


@pytest.mark.parametrize("dims", [1, 2, 3, 4, 5])
def test_every_dim_of_1_to_5_dims_uneven_and_empty(dims):
    shape = (5, 3, 2, 4, 3)[:dims]
    full = torch.zeros(shape)
    for _, mesh in each_rank((2, 2)):
        pairs = itertools.product([R, *map(S, range(dims))], repeat=2)
        for placements in pairs:
            assert_equals_one_device(torch.randn_like, full, mesh, placements, str(placements))
            assert_equals_one_device(torch.rand_like, full, mesh, placements, str(placements))


DTYPES = {
    "uniform_": (torch.float64, torch.bfloat16, torch.float16),
    "normal_": (torch.float64, torch.bfloat16, torch.float16),
    "bernoulli_": (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool),
    "exponential_": (torch.float64, torch.bfloat16, torch.float16),
    "random_": (torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    "randint_like": (torch.int64, torch.int16, torch.float16),
    "dropout": (torch.float64, torch.bfloat16, torch.float16),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, dtypes in DTYPES.items() for dtype in dtypes]
)
def test_operators_in_every_dtype(name, dtype):
    full = torch.ones(9, 5, dtype=dtype)
    for _, mesh in each_rank((2, 2)):
        for placements in [(S(0), S(1)), (S(0), S(0)), (R, S(1))]:
            assert_equals_one_device(OPERATORS[name], full, mesh, placements, name)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_global_tensors_whose_dims_are_permuted_in_memory(order):
    full = torch.zeros([(4, 3, 5)[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(3)]
    )
    for _, mesh in each_rank((2, 2)):
        for placements in [(S(0), S(2)), (S(1), R), (S(2), S(2))]:
            assert_equals_one_device(lambda x: x.uniform_(), full, mesh, placements, str(order))
            assert_equals_one_device(lambda x: x.normal_(), full, mesh, placements, str(order))


def fifty_operations(x):
    """A sequence in which every operator meets the state that the others left."""
    names = [name for name in OPERATORS if name not in ("orthogonal_ wide", "new_empty")]
    values = []
    for index in range(50):
        name = names[index * 7 % len(names)]
        values.append(OPERATORS[name](x.clone()))
        if index % 3 == 0:  # plain tensors draw from the same generator in between
            values.append(torch.randn(index % 5 + 1))
    return values


def test_a_sequence_of_fifty_operations_is_one_stream():
    full = torch.linspace(-1, 1, 35).view(7, 5)
    torch.manual_seed(1)
    expected = fifty_operations(full)
    state = torch.get_rng_state()
    for _, mesh in each_rank((2, 2)):
        dtensor = distribute_tensor(full, mesh, (S(0), S(1)), src_data_rank=None)
        torch.manual_seed(1)
        for index, (actual, wanted) in enumerate(
            zip(fifty_operations(dtensor), expected, strict=True)
        ):
            if isinstance(actual, DTensor):
                wanted = slice_of(wanted, region_of(actual)).flatten()
                actual = actual._local_tensor.flatten()
            assert_bitwise(actual, wanted, f"operation {index}")
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["rand", "randn"])
def test_factories_of_torch_distributed_tensor(name):
    import torch.distributed.tensor as dt

    torch.manual_seed(0)
    expected = getattr(torch, name)(5, 6, dtype=torch.float64)
    for _, mesh in each_rank((2, 2)):
        torch.manual_seed(0)
        result = getattr(dt, name)(
            5, 6, dtype=torch.float64, device_mesh=mesh, placements=(S(1), S(0)), requires_grad=True
        )
        assert result.requires_grad
        assert_bitwise(result._local_tensor.detach(), slice_of(expected, region_of(result)))


def test_an_explicit_generator_is_used_and_the_default_left_alone():
    expected = torch.empty(9).uniform_(generator=torch.Generator().manual_seed(3))
    for _, mesh in each_rank((2,)):
        generator = torch.Generator().manual_seed(3)
        before = torch.get_rng_state()
        dtensor = distribute_tensor(torch.zeros(9), mesh, [S(0)], src_data_rank=None)
        dtensor.uniform_(generator=generator)
        assert_bitwise(dtensor._local_tensor, slice_of(expected, region_of(dtensor)))
        assert torch.equal(torch.get_rng_state(), before)


def test_modules_initialised_from_the_meta_device():
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
            part = slice_of(wanted.detach(), region_of(actual))
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
            assert_bitwise(actual._local_tensor, slice_of(expected, region_of(actual)))


def test_native_dropout_has_the_gradient_of_its_mask():
    full = torch.linspace(1, 2, 20).view(5, 4)
    with fake_mesh((2,), rank=1) as mesh:
        x = distribute_tensor(full, mesh, [S(0)], src_data_rank=None).requires_grad_()
        y, mask = torch.native_dropout(x, 0.5, True)
        y.backward(torch.ones_like(y))
        assert_bitwise(x.grad._local_tensor, mask._local_tensor.float() * 2)


@pytest.mark.parametrize("dim", [0, 1], ids=["by batch", "by head"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_on_the_cpu_draws_one_devices_mask(dim, causal):
    generator = torch.Generator().manual_seed(1)
    heads = [torch.randn(4, 4, 6, 8, generator=generator) for _ in range(3)]
    attend = partial(F.scaled_dot_product_attention, dropout_p=0.3, is_causal=causal)
    torch.manual_seed(0)
    expected, state = attend(*heads), torch.get_rng_state()
    for _, mesh in each_rank((2,)):
        sharded = [distribute_tensor(x, mesh, [S(dim)], src_data_rank=None) for x in heads]
        torch.manual_seed(0)
        with implicit_replication():  # torch makes the causal mask a plain tensor
            result = attend(*sharded)
        assert_bitwise(result._local_tensor, slice_of(expected, region_of(result)))
        assert torch.equal(torch.get_rng_state(), state)


def test_multinomial_draws_on_replicas_and_refuses_shards():
    weights = torch.rand(4, 9)
    torch.manual_seed(0)
    expected = torch.multinomial(weights, 3)
    with fake_mesh((2,), rank=1) as mesh:
        torch.manual_seed(0)
        replica = distribute_tensor(weights, mesh, [R], src_data_rank=None)
        assert_bitwise(torch.multinomial(replica, 3)._local_tensor, expected)
        sharded = distribute_tensor(weights, mesh, [S(0)], src_data_rank=None)
        with pytest.raises(ValueError, match=r"aten\.multinomial.*redistribute it to Replicate"):
            torch.multinomial(sharded, 3)


@pytest.mark.parametrize(
    ("operate", "message"),
    [
        (lambda x: x.uniform_(), r"aten\.uniform_\.default: .*redistribute it"),
        (torch.rand_like, r"aten\.rand_like\.default: .*redistribute it"),
        (torch.bernoulli, r"aten\.bernoulli\.default: .*redistribute it"),
    ],
)
def test_a_partial_placement_is_refused_by_operator_and_remedy(operate, message):
    with fake_mesh((2,)) as mesh:
        partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
        with pytest.raises(ValueError, match=message):
            operate(partial)


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: x.cauchy_(),
        lambda x: x.log_normal_(),
        torch.poisson,
        lambda x: F.rrelu(x, training=True),
    ],
)
def test_operators_that_are_not_reproduced_raise_and_draw_nothing(operate):
    with fake_mesh((2,)) as mesh:
        dtensor = distribute_tensor(torch.ones(4, 4), mesh, [S(0)], src_data_rank=None)
        before = torch.get_rng_state()
        with pytest.raises(ValueError, match="dist-rng does not reproduce this operator's stream"):
            operate(dtensor)
        assert torch.equal(torch.get_rng_state(), before)


def test_probabilities_that_are_placed_otherwise_are_refused():
    with fake_mesh((2,)) as mesh:
        dtensor = distribute_tensor(torch.ones(4, 4), mesh, [S(0)], src_data_rank=None)
        other = distribute_tensor(torch.ones(4, 4), mesh, [S(1)], src_data_rank=None)
        with pytest.raises(ValueError, match="make them alike"):
            dtensor.bernoulli_(other)


def test_uninstall_restores_stock_and_install_may_be_called_twice():
    table = DTensor._op_dispatcher._custom_op_handlers
    import torch.distributed.tensor._api as api

    with_ours = dict(table)
    dist_rng.install()
    assert dict(table) == with_ours
    dist_rng.uninstall()
    assert not dist_rng.is_installed()
    assert torch.ops.aten.uniform_.default not in table
    assert torch.ops.aten.argmin.default in table
    assert api._dtensor_init_helper.__module__ == "torch.distributed.tensor._api"
    assert nn.init.orthogonal_.__module__ == "torch.nn.init"
    dist_rng.uninstall()
    dist_rng.install()
    assert dict(table).keys() == with_ours.keys()
