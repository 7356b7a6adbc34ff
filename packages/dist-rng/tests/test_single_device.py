"""single_device_rng(geometry): torch's own operators on CPU tensors draw a GPU's numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import dist_rng
from dist_rng import Geometry, Region, single_device_rng
from dist_rng.placement import region_of, slice_of
from testkit import assert_bitwise, each_rank, fake_mesh

# One SM of one block: small tensors already need several calls of a thread.
TINY = Geometry(sm_count=1, max_threads_per_sm=256)

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


def test_the_first_uniforms_are_those_of_the_philox_definition():
    """By hand: thread t draws words of the counter (call, t) under the key 0."""
    from dist_rng.philox import philox4x32

    with single_device_rng(geometry=Geometry.H100):
        torch.manual_seed(0)
        drawn = torch.rand(5)
    for thread, value in enumerate(drawn.tolist()):
        word = philox4x32((0, 0, thread, 0), (0, 0))[0]
        # [0, 1): the kernel turns the upper bound, 1, into the lower.
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
            assert_bitwise(result._local_tensor, slice_of(expected, region_of(result)))


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


def test_the_cpus_own_stream_goes_on_undisturbed():
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
    ],
)
def test_what_is_not_emulated_raises(operate):
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
    torch.manual_seed(0)
    assert_bitwise(torch.rand(4), expected)
    with fake_mesh((2,)) as mesh:
        assert distribute_tensor(ones(), mesh, [Shard(0)], src_data_rank=None).shape == (37, 41)
