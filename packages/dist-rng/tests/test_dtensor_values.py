"""Every random operator gives one device's values, in every dtype and on every placement.

Each rank's part is computed in its own turn on a fake mesh: nothing communicates, so nothing is
missing. The product of all there is would take hours. Operators that share a path share the
proof: every operator x dtype meets a few placements, every placement x shape a few operators,
and hypothesis roams over the product.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.tensor as dt
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import dist_rng
from dist_rng import Region
from dist_rng.regions.placements import slice_of
from testkit import CommLog, assert_bitwise, each_rank, fake_mesh

S, R = Shard, Replicate()
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMMON = (*FLOATS, *INTS, torch.bool)
NUMBERS = (*FLOATS, *INTS)
TRANSPOSING_GATHERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


@pytest.fixture(autouse=True, scope="module")
def _installed():
    dist_rng.install()
    yield
    dist_rng.uninstall()


def of(x):
    """Returns the default generator as an argument: other overloads than without it."""
    return {"generator": torch.default_generator}


def chances(x):
    """Returns probabilities that are exact in every dtype, in any order of evaluation."""
    return x.abs().clamp(max=4) * 0.25


# Operators on a tensor x, and the dtypes that x may have.
FILLS = {
    "uniform_": (lambda x: x.uniform_(-1, 2), FLOATS),
    "uniform_ from a generator": (lambda x: x.uniform_(**of(x)), FLOATS),
    "normal_": (lambda x: x.normal_(1, 2), FLOATS),
    "bernoulli_": (lambda x: x.bernoulli_(0.3), COMMON),
    "bernoulli_ from tensor": (lambda x: x.bernoulli_(chances(x.float())), COMMON),
    "bernoulli_ from scalar tensor": (lambda x: x.bernoulli_(torch.tensor(0.3)), COMMON),
    "exponential_": (lambda x: x.exponential_(2.0), FLOATS),
    "cauchy_": (lambda x: x.cauchy_(1.0, 2.0), FLOATS),
    "cauchy_ from a generator": (lambda x: x.cauchy_(**of(x)), FLOATS),
    "geometric_": (lambda x: x.geometric_(0.2), NUMBERS),
    "log_normal_": (lambda x: x.log_normal_(0.3, 0.8), FLOATS),
    "random_": (lambda x: x.random_(), COMMON),
    "random_ to": (lambda x: x.random_(9), (*NUMBERS, *UNSIGNED)),
    "random_ from to": (lambda x: x.random_(3, 9), (*NUMBERS, *UNSIGNED)),
    "random_ from": (lambda x: x.random_(3, None), (*NUMBERS, torch.uint16, torch.uint32)),
    "random_ from 0": (lambda x: x.random_(0, None), COMMON),
}
LIKE = {
    "rand_like": (torch.rand_like, FLOATS),
    "rand_like of another dtype": (lambda x: torch.rand_like(x, dtype=torch.float64), COMMON),
    "rand_like from a generator": (lambda x: torch.rand_like(x, **of(x)), FLOATS),
    "rand_like contiguous": (
        lambda x: torch.rand_like(x, memory_format=torch.contiguous_format),
        FLOATS,
    ),
    "randn_like": (torch.randn_like, FLOATS),
    "randn_like of another dtype": (lambda x: torch.randn_like(x, dtype=torch.bfloat16), COMMON),
    "randn_like from a generator": (lambda x: torch.randn_like(x, **of(x)), FLOATS),
    "randint_like": (lambda x: torch.randint_like(x, 7), NUMBERS),
    "randint_like low": (lambda x: torch.randint_like(x, 3, 7), NUMBERS),
    "randint_like of another dtype": (
        lambda x: torch.randint_like(x, -3, 7, dtype=torch.int32),
        COMMON,
    ),
    "randint_like from a generator": (lambda x: torch.randint_like(x, 7, **of(x)), NUMBERS),
    "randint_like low from a generator": (
        lambda x: torch.randint_like(x, 3, 7, **of(x)),
        NUMBERS,
    ),
    "bernoulli of p": (lambda x: torch.bernoulli(x, 0.3), COMMON),
}
# These also compute with x.
COMPOSED = {
    "bernoulli": (lambda x: torch.bernoulli(chances(x)), FLOATS),
    "normal of means": (lambda x: torch.normal(x, 2.0), FLOATS),
    "normal of stds": (lambda x: torch.normal(1.0, x.abs()), FLOATS),
    "normal of both": (lambda x: torch.normal(x, x.abs()), FLOATS),
    "dropout": (lambda x: F.dropout(x, 0.4), FLOATS),
    "dropout in place": (lambda x: F.dropout(x.clone(), 0.4, inplace=True), FLOATS),
    "dropout of everything": (lambda x: F.dropout(x, 1.0), FLOATS),
    "dropout off": (lambda x: F.dropout(x, 0.4, training=False), FLOATS),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.3, training=True), FLOATS),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.4, True)[0], FLOATS),
    "native_dropout's mask": (lambda x: torch.native_dropout(x, 0.4, True)[1], FLOATS),
    "native_dropout of everything": (lambda x: torch.native_dropout(x, 1.0, True)[0], FLOATS),
    "native_dropout of nothing": (lambda x: torch.native_dropout(x, 0.0, True)[1], FLOATS),
    "native_dropout by default": (lambda x: torch.native_dropout(x, 0.4, None)[0], FLOATS),
    "native_dropout off": (lambda x: torch.native_dropout(x, 0.4, False)[0], FLOATS),
    "feature dropout": (lambda x: torch.feature_dropout(x.unsqueeze(-1), 0.4, True), FLOATS),
}
MATRICES = {
    "rand_like of a transpose": (lambda x: torch.rand_like(x.t()), FLOATS),
    "normal of transposes": (lambda x: torch.normal(x.t(), x.t().abs()), FLOATS),
    "bernoulli of a transpose": (lambda x: torch.bernoulli(chances(x.t())), FLOATS),
    "kaiming_normal_": (nn.init.kaiming_normal_, FLOATS),
    "xavier_uniform_": (nn.init.xavier_uniform_, FLOATS),
    "orthogonal_": (lambda x: nn.init.orthogonal_(x), (torch.float32, torch.float64)),
    "orthogonal_ wide": (lambda x: nn.init.orthogonal_(x.t()), (torch.float32, torch.float64)),
    "sparse_": (lambda x: nn.init.sparse_(x, 0.2), FLOATS),
    "new_empty": (lambda x: x.new_empty(5, 4).normal_(), FLOATS),
}
OPERATORS = FILLS | LIKE | COMPOSED | MATRICES


@dataclass(frozen=True)
class Drawn:
    """The result of one device, and the state of its generator afterwards."""

    result: torch.Tensor
    state: torch.Tensor


def start():
    torch.default_generator.manual_seed(5)  # torch.manual_seed takes longer than most draws
    torch.randn(3)  # not at the start of the stream, and with a cached sample


def on_one_device(operate, full):
    start()
    return Drawn(operate(full.clone()), torch.get_rng_state())


def strides(x):
    """Returns the strides that matter: torch and DTensor differ in those of dims of size one."""
    pairs = zip(x.shape, x.stride(), strict=True)
    return [stride for size, stride in pairs if size != 1] if x.numel() else []


def assert_rank_draws(drawn, operate, full, mesh, placements, what):
    dtensor = distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)
    start()
    result = operate(dtensor)
    what = f"{what} of {full.dtype} {tuple(full.shape)} at {mesh.get_coordinate()} {placements}"
    assert isinstance(result, DTensor), what
    assert result.shape == drawn.result.shape, what
    assert strides(result) == strides(drawn.result), what
    local = result._local_tensor
    expected = slice_of(drawn.result, Region.of(result))
    assert_bitwise(local, expected.reshape(local.shape), what)
    assert torch.equal(torch.get_rng_state(), drawn.state), f"{what}: the generator differs"


def assert_mesh_draws(cases, mesh_shape, placements):
    """Runs every (name, operate, full) on one device and on every rank of a mesh."""
    drawn = [on_one_device(operate, full) for _, operate, full in cases]
    for _, mesh in each_rank(mesh_shape):
        for expected, (name, operate, full) in zip(drawn, cases, strict=True):
            for each in placements:
                assert_rank_draws(expected, operate, full, mesh, each, name)


def ramp(shape, dtype, order=None):
    """Returns small values, exact in every dtype, whose dims have this order in memory."""
    order = order or range(len(shape))
    dense = torch.empty([shape[dim] for dim in order])
    ramp = dense.permute([list(order).index(dim) for dim in range(len(shape))])
    values = torch.arange(ramp.numel()).view(shape) % 17
    if dtype.is_floating_point:
        values = (values - 8) / 2
    return torch.empty_like(ramp, dtype=dtype).copy_(values)


_OF_TRANSPOSES = (
    "rand_like of a transpose",
    "normal of transposes",
    "bernoulli of a transpose",
    "orthogonal_ wide",
)

FEW_PLACEMENTS = [
    ((3,), (S(0),)),
    ((2, 2), (S(0), S(1))),
    pytest.param((2, 2), (S(0), S(0)), marks=pytest.mark.slow),
    pytest.param((1, 3), (R, S(1)), marks=pytest.mark.slow),
]
MORE_PLACEMENTS = [
    ((1,), (S(0),)),
    ((8,), (S(0),)),
    ((2,), (S(1),)),
    ((4,), (R,)),
    ((2, 2), (S(1), S(0))),
    ((2, 3), (R, S(1))),
    ((2, 2), (S(0), S(0))),
    pytest.param((2, 2, 2), (S(0), R, S(0)), marks=pytest.mark.slow),
]


def operators_on(*dtypes, mesh_shape=(1,)):
    # Where ranks have no rows, newer torch gathers a matrix to transpose it.
    rows = 6
    left_out = _OF_TRANSPOSES if math.prod(mesh_shape) > rows and TRANSPOSING_GATHERS else ()
    return [
        (name, operate, ramp((rows, 7), dtype))
        for name, (operate, possible) in OPERATORS.items()
        for dtype in possible
        if dtype in dtypes and name not in left_out
    ]


@pytest.mark.parametrize(("mesh_shape", "placements"), FEW_PLACEMENTS, ids=str)
def test_every_operator_in_every_dtype(mesh_shape, placements):
    assert_mesh_draws(operators_on(*COMMON, *UNSIGNED), mesh_shape, [placements])


@pytest.mark.parametrize(("mesh_shape", "placements"), MORE_PLACEMENTS, ids=str)
def test_every_operator_on_every_placement(mesh_shape, placements):
    cases = operators_on(torch.float32, mesh_shape=mesh_shape)
    assert_mesh_draws(cases, mesh_shape, [placements])


@pytest.mark.parametrize(("mesh_shape", "placements"), FEW_PLACEMENTS + MORE_PLACEMENTS, ids=str)
def test_no_operator_communicates(mesh_shape, placements):
    with fake_mesh(mesh_shape) as mesh, CommLog() as log:
        for _, operate, full in operators_on(torch.float32, mesh_shape=mesh_shape):
            operate(distribute_tensor(full, mesh, placements, src_data_rank=None))
    log.assert_counts({})


# Draws of one word, of two, in blocks with a remainder, in pairs, of 32-bit and 64-bit integers.
SHARED_PATHS = [
    ("uniform_", torch.float32),
    ("uniform_", torch.float64),
    ("normal_", torch.float32),
    ("normal_", torch.float64),
    ("normal_", torch.bfloat16),
    ("randn_like", torch.float16),
    ("bernoulli_", torch.bool),
    ("exponential_", torch.float32),
    ("log_normal_", torch.float32),
    ("random_ from to", torch.uint8),
    ("random_", torch.int64),
    ("dropout", torch.float32),
]


def shared_paths(shape, order=None):
    return [
        (f"{name} in order {order}", OPERATORS[name][0], ramp(shape, dtype, order))
        for name, dtype in SHARED_PATHS
    ]


@pytest.mark.parametrize(
    "world_size", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 9))]
)
def test_every_dim_of_1_to_5_dims_on_1_to_8_ranks(world_size):
    # Uneven for most world sizes, with empty shards on 3 ranks and more; (1, 9) on 2.
    for shape in [(5,), (40,), (1, 9), (5, 3), (5, 3, 2), (2, 3, 4, 5), (3, 2, 3, 2, 4), (0, 3)]:
        placements = [(R,), *((S(dim),) for dim in range(len(shape)))]
        assert_mesh_draws(shared_paths(shape), (world_size,), placements)


@pytest.mark.parametrize(
    "mesh_shape", [(2, 3), *(pytest.param((n, 2), marks=pytest.mark.slow) for n in (2, 4))], ids=str
)
def test_two_axes_on_5_dims_once_and_twice_on_one_dim(mesh_shape):
    pairs = [(0, 0), (0, 1), (4, 3), (4, 4), (0, 2), (2, 0), (3, 4)]
    hybrid = [(R, S(0)), (R, S(4)), (S(2), R), (R, R)]
    placements = [*((S(first), S(second)) for first, second in pairs), *hybrid]
    assert_mesh_draws(shared_paths((5, 3, 2, 4, 7)), mesh_shape, placements)


@pytest.mark.parametrize("dims", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_pair_of_placements_of_fewer_dims(dims):
    placements = list(itertools.product([R, *map(S, range(dims))], repeat=2))
    assert_mesh_draws(shared_paths((5, 3, 2, 4)[:dims]), (2, 2), placements)


def test_strided_shards():
    strided = _StridedShard(0, split_factor=2)
    placements = [(strided, S(0)), (strided, S(1)), (S(1), strided)]
    assert_mesh_draws(shared_paths((9, 5, 4)), (2, 2), placements)


@pytest.mark.slow
def test_three_axes_and_strided_shards():
    strided = _StridedShard(0, split_factor=2)
    placements = [(S(0), S(0), S(0)), (S(2), S(0), S(2)), (R, S(1), R), (strided, S(1), S(0))]
    assert_mesh_draws(shared_paths((9, 5, 4)), (2, 2, 2), placements)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_global_tensors_whose_dims_are_permuted_in_memory(order):
    placements = [(S(0), S(2)), (S(1), R), (S(2), S(2)), (S(0), S(0)), (R, S(1))]
    assert_mesh_draws(shared_paths((4, 3, 5), order), (2, 2), placements)


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (0, 4, 1, 2, 3), (2, 0, 4, 1, 3)], ids=str)
def test_permuted_tensors_of_5_dims(order):
    placements = [(S(0), S(2)), (S(4), S(3)), (S(4), S(4)), (R, S(0))]
    assert_mesh_draws(shared_paths((5, 3, 2, 4, 3), order), (2, 2), placements)


def test_sources_that_are_not_dense():
    # Only outputs are drawn, and they are dense. (Dims that are sliced are not sharded here.)
    names = [name for name in LIKE | COMPOSED if not name.endswith(" off")]
    cases = [
        (f"{name} of a slice", lambda x, name=name: OPERATORS[name][0](x[..., 1:]), full)
        for name in names
        for full in [ramp((4, 3, 5), torch.float32), ramp((4, 3, 5), torch.float32, (2, 0, 1))]
    ]
    placements = [(S(0), S(1)), (S(0), S(0)), (R, S(1)), (R, R)]
    assert_mesh_draws(cases, (2, 2), placements)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["rand", "randn"])
def test_factories_of_torch_distributed_tensor(name, dtype):
    start()
    expected, state = getattr(torch, name)(5, 6, dtype=dtype), torch.get_rng_state()
    for _, mesh in each_rank((2, 2)):
        for placements in [(S(1), S(0)), (S(0), S(0)), (R, S(1))]:
            start()
            options = {"device_mesh": mesh, "placements": placements, "requires_grad": True}
            result = getattr(dt, name)(5, 6, dtype=dtype, **options)
            assert result.requires_grad
            assert_bitwise(result._local_tensor.detach(), slice_of(expected, Region.of(result)))
            assert torch.equal(torch.get_rng_state(), state)


@st.composite
def meshes(draw):
    """Axis sizes of a mesh of at most 8 ranks, with an axis rank each."""
    sizes = []
    for _ in range(draw(st.integers(1, 3))):
        sizes.append(draw(st.integers(1, 8 // int(torch.Size(sizes).numel()))))
    return tuple(sizes)


@st.composite
def products(draw):
    """An operator, a dtype, a tensor in any order in memory, a mesh, a rank, placements."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=5)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    mesh_shape = draw(meshes())
    rank = draw(st.integers(0, int(torch.Size(mesh_shape).numel()) - 1))
    one = st.just(R)
    if shape:
        dims = st.integers(0, len(shape) - 1)
        strided = st.builds(_StridedShard, dims, split_factor=st.integers(1, 3))
        one = one | st.builds(Shard, dims) | st.builds(Shard, dims) | strided
    placements = tuple(draw(one) for _ in mesh_shape)
    name = draw(st.sampled_from([*FILLS, *LIKE]))
    dtype = draw(st.sampled_from(OPERATORS[name][1]))
    return name, ramp(shape, dtype, order), mesh_shape, rank, placements


def assert_product_draws(product):
    name, full, mesh_shape, rank, placements = product
    operate = OPERATORS[name][0]
    drawn = on_one_device(operate, full)
    with fake_mesh(mesh_shape, rank=rank) as mesh:
        assert_rank_draws(drawn, operate, full, mesh, placements, name)


@settings(max_examples=200, deadline=None)
@given(products())
def test_any_operator_dtype_shape_order_mesh_and_placement(product):
    assert_product_draws(product)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(products())
def test_many_products_of_operator_dtype_shape_order_mesh_and_placement(product):
    assert_product_draws(product)


def fifty_operations(x):
    """Every operator starts from the state in which the ones before it ended."""
    names = [name for name in OPERATORS if name not in ("orthogonal_ wide", "new_empty")]
    values = []
    for index in range(50):
        name = names[index * 7 % len(names)]
        values.append(OPERATORS[name][0](x.clone()))
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
                wanted = slice_of(wanted, Region.of(actual)).flatten()
                actual = actual._local_tensor.flatten()
            assert_bitwise(actual, wanted, f"operation {index}")
        assert torch.equal(torch.get_rng_state(), state)
