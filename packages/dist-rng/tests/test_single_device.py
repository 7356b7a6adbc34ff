"""single_device_rng(geometry): torch's operators on CPU tensors draw a GPU's numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import dist_rng
from dist_rng import Geometry, Region, single_device_rng
from dist_rng.regions.placements import slice_of
from testkit import assert_bitwise, each_rank, fake_mesh

# One SM of one block: small tensors already need several calls of a thread.
TINY = Geometry(sm_count=1, max_threads_per_sm=256)
NATIVE = (F.dropout, torch.dropout, nn.init.orthogonal_)

OPERATORS = {
    "rand": lambda x: torch.rand(37, 41),
    "randn": lambda x: torch.randn(37, 41, dtype=torch.float64),
    "randint": lambda x: torch.randint(-5, 900, (37, 41)),
    "normal": lambda x: torch.normal(1.0, 2.0, (37, 41)),
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "exponential_": lambda x: x.exponential_(2.0),
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 7),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x, 0.4, inplace=True),
    "nn.Dropout": lambda x: nn.Dropout(0.1)(x),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
}


def ones():
    return torch.ones(37, 41)


@pytest.mark.parametrize("operate", OPERATORS.values(), ids=OPERATORS.keys())
def test_an_operator_draws_the_emulated_stream_and_not_the_cpus(operate):
    torch.manual_seed(0)
    on_cpu = operate(ones())
    with single_device_rng(geometry=TINY):
        torch.manual_seed(0)
        first = operate(ones())
        second = operate(ones())
        torch.manual_seed(0)
        again = operate(ones())
    assert_bitwise(again, first)
    assert not torch.equal(second, first)
    assert not torch.equal(on_cpu, first)


FACTORIES = {
    "rand": (lambda **o: torch.rand(37, 41, **o), lambda x, **g: x.uniform_(**g)),
    "randn": (lambda **o: torch.randn(37, 41, **o), lambda x, **g: x.normal_(**g)),
    "normal": (
        lambda **o: torch.normal(1.0, 2.0, (37, 41), **o),
        lambda x, **g: x.normal_(1.0, 2.0, **g),
    ),
    "randint": (lambda **o: torch.randint(9, (37, 41), **o), lambda x, **g: x.random_(0, 9, **g)),
    "randint low": (
        lambda **o: torch.randint(-5, 9, (37, 41), **o),
        lambda x, **g: x.random_(-5, 9, **g),
    ),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_draws_what_a_fill_of_its_dtype_draws(name):
    make, fill = FACTORIES[name]
    default = torch.int64 if "randint" in name else torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        for dtype in (None, torch.float32):
            wanted = torch.empty(37, 41, dtype=dtype or default)
            with single_device_rng(geometry=TINY):
                torch.manual_seed(2)
                fill(wanted)
                torch.manual_seed(2)
                assert_bitwise(make(dtype=dtype), wanted)
                fill(wanted, generator=torch.Generator().manual_seed(4))
                drawn = make(dtype=dtype, generator=torch.Generator().manual_seed(4))
                assert_bitwise(drawn, wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_operator_called_by_its_own_name_has_the_dtype_that_torch_gives():
    calls = (
        lambda: torch.ops.aten.randint.default(9, [3]),
        lambda: torch.ops.aten.randint.default(9, [3], dtype=None),
        lambda: torch.ops.aten.rand.default([3], dtype=None, device=None, pin_memory=False),
    )
    for call in calls:
        expected = call().dtype
        with single_device_rng(geometry=TINY):
            assert call().dtype == expected


def test_meta_tensors_call_torch():
    with single_device_rng(geometry=TINY):
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        x = torch.empty(4, device="meta")
        for drawn in (x.cauchy_(), torch.randperm(4, device="meta"), torch.rand(4, device="meta")):
            assert drawn.is_meta
        assert F.dropout(x, 0.5).is_meta
        assert_bitwise(torch.rand(3), expected)


def test_torch_dropout_equals_functional_dropout():
    with single_device_rng(geometry=TINY):
        torch.manual_seed(0)
        expected = F.dropout(ones(), 0.4)
        torch.manual_seed(0)
        assert_bitwise(torch.dropout(ones(), 0.4, True), expected)
        assert_bitwise(torch.dropout(ones(), 0.4, False), ones())
        assert_bitwise(F.dropout(ones(), 0.4, training=False), ones())


def test_the_first_uniforms_are_those_of_the_philox_definition():
    """By definition thread t draws the words of the counter (call, t) with the key 0."""
    from dist_rng.philox.reference import philox4x32

    with single_device_rng(geometry=Geometry.H100):
        torch.manual_seed(0)
        drawn = torch.rand(5)
    for thread, value in enumerate(drawn.tolist()):
        word = philox4x32((0, 0, thread, 0), (0, 0))[0]
        # [0, 1): the kernel replaces the upper bound, 1, by the lower one.
        expected = torch.tensor(word * 2.0**-32 + 2.0**-33, dtype=torch.float32).item()
        assert value == (0.0 if expected == 1.0 else expected)


def test_the_geometry_decides_beyond_one_wave():
    def draw(geometry):
        with single_device_rng(geometry=geometry):
            torch.manual_seed(0)
            return torch.rand(5000)

    small, large = draw(TINY), draw(Geometry.H100)
    assert_bitwise(small[:256], large[:256])
    assert not torch.equal(small[256:], large[256:])


@pytest.mark.parametrize(
    "operate",
    [
        lambda x: x.uniform_(),
        lambda x: x.bernoulli_(0.4),
        lambda x: F.dropout(x, 0.3),
        lambda x: F.dropout(x, 0.3, inplace=True),
        lambda x: torch.rand_like(x),
        lambda x: nn.init.orthogonal_(x),
    ],
)
def test_a_dtensor_holds_its_part_of_the_emulated_tensor_without_install(operate):
    full = torch.ones(18, 20)
    with single_device_rng(geometry=TINY):
        torch.manual_seed(3)
        expected = operate(full.clone())
        after = torch.rand(3)
    assert not dist_rng.is_installed()
    for _, mesh in each_rank((2, 2)):
        for placements in [(Shard(0), Shard(1)), (Shard(1), Shard(1))]:
            dtensor = distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)
            with single_device_rng(geometry=TINY):
                torch.manual_seed(3)
                result = operate(dtensor)
                assert_bitwise(torch.rand(3), after)
            assert_bitwise(result._local_tensor, slice_of(expected, Region.of(result)))


def test_local_tensors_with_a_region_draw_the_same():
    with single_device_rng(geometry=TINY):
        torch.manual_seed(1)
        expected = torch.empty(30, 20).uniform_()
        torch.manual_seed(1)
        part = dist_rng.uniform_(torch.empty(10, 20), Region.box((30, 20), (10, 0), (10, 20)))
    assert_bitwise(part, expected[10:20])


def test_activation_checkpointing_draws_the_mask_again():
    def gradient(inside):
        x = torch.linspace(0, 1, 600).requires_grad_()
        torch.manual_seed(4)
        block = lambda t: F.dropout(t.sin(), 0.5) * t
        y = checkpoint(block, x, use_reentrant=False) if inside else block(x)
        y.sum().backward()
        return x.grad

    with single_device_rng(geometry=TINY):
        assert_bitwise(gradient(inside=True), gradient(inside=False))


def test_native_dropout_draws_with_p_0_and_not_with_p_1():
    """As in native_dropout_cuda, which returns before its kernel only for p = 1."""

    def drawn(p):
        with single_device_rng(geometry=TINY):
            torch.manual_seed(0)
            values, mask = torch.native_dropout(ones(), p, True)
            return values, mask, torch.rand(5)

    with single_device_rng(geometry=TINY):
        torch.manual_seed(0)
        undisturbed = torch.rand(5)
    for p, value in ((0.0, True), (1.0, False)):
        values, mask, after = drawn(p)
        assert_bitwise(mask, torch.full((37, 41), value))
        assert_bitwise(values, torch.full((37, 41), float(value)))
        assert torch.equal(after, undisturbed) is not value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dropout_draws_the_mask_of_its_inputs_dtype(dtype):
    whole = torch.linspace(1, 2, 37 * 8).view(37, 8).to(dtype)
    part = Region.box((37, 8), (20, 0), (17, 8))
    with single_device_rng(geometry=TINY):
        torch.manual_seed(0)
        dropped = F.dropout(whole, 0.4)
        nonzero = dropped != 0
        scaled = whole.double() if dtype == torch.float64 else whole.float()
        assert_bitwise(dropped[nonzero], (scaled * (1.0 / (1.0 - 0.4))).to(dtype)[nonzero])
        torch.manual_seed(0)
        assert_bitwise(dist_rng.dropout(whole[20:], part, 0.4), dropped[20:])


@pytest.mark.parametrize(("shape", "p"), [((37, 41), 0.0), ((0, 41), 0.5)], ids=str)
def test_dropout_with_p_0_draws_nothing(shape, p):
    with single_device_rng(geometry=TINY):
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        assert_bitwise(F.dropout(torch.ones(shape), p), torch.ones(shape))
        assert_bitwise(torch.rand(3), expected)


def test_dropout_with_p_1_multiplies_by_zero_as_on_a_gpu():
    x = torch.tensor([-1.0, 1.0, float("inf")])
    expected = F.dropout(x, 1.0)
    with single_device_rng(geometry=TINY):
        assert_bitwise(F.dropout(x, 1.0), expected)


def test_fused_dropout_of_a_tensor_that_is_not_dense_raises_with_the_remedy():
    with (
        single_device_rng(geometry=TINY),
        pytest.raises(ValueError, match=r"native_dropout.*dense.*make it contiguous first"),
    ):
        F.dropout(ones()[:, 1:], 0.5)


def test_a_slice_is_drawn_like_its_dense_copy():
    with single_device_rng(geometry=TINY):
        torch.manual_seed(0)
        expected = torch.rand_like(ones()[:, 1:].contiguous())
        torch.manual_seed(0)
        assert_bitwise(torch.rand_like(ones()[:, 1:]), expected)


def test_dropout_imported_by_name_is_fused_too():
    from torch.nn.functional import dropout  # before the context patches the module

    with single_device_rng(geometry=TINY):
        torch.manual_seed(0)
        expected = F.dropout(torch.ones(32, 40), 0.4)
        torch.manual_seed(0)
        by_name = dropout(torch.ones(32, 40), 0.4)
        torch.manual_seed(0)
        composed = F.dropout(torch.ones(32, 40), 0.4, inplace=True)
    assert_bitwise(by_name, expected)
    assert not torch.equal(composed, expected)


def test_the_cpu_stream_is_not_affected():
    torch.manual_seed(7)
    torch.rand(3)
    expected = torch.rand(2000)
    torch.manual_seed(7)
    torch.rand(3)
    with single_device_rng(geometry=Geometry.A100):
        torch.rand(100)
    assert_bitwise(torch.rand(2000), expected)


@pytest.mark.parametrize(
    "operate",
    [
        lambda: torch.randperm(9),
        lambda: torch.ones(4).multinomial(2),
        lambda: torch.ones(4).cauchy_(),
        lambda: torch.rand(4, out=torch.ones(4)),
        lambda: torch.randint(3, (4,), out=torch.ones(4, dtype=torch.int64)),
    ],
)
def test_operators_that_are_not_emulated_raise(operate):
    with (
        single_device_rng(geometry=TINY),
        pytest.raises(ValueError, match="does not reproduce this operator's stream"),
    ):
        operate()


def test_an_error_inside_restores_everything():
    torch.manual_seed(0)
    expected = torch.rand(4)
    with pytest.raises(KeyError), single_device_rng(geometry=TINY):
        raise KeyError
    assert (F.dropout, torch.dropout, nn.init.orthogonal_) == NATIVE
    torch.manual_seed(0)
    assert_bitwise(torch.rand(4), expected)
    with fake_mesh((2,)) as mesh:
        assert distribute_tensor(ones(), mesh, [Shard(0)], src_data_rank=None).shape == (37, 41)
