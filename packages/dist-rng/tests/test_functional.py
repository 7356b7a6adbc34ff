"""The fills without DTensor: parts of one device's tensor, selected by region."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dist_rng
from dist_rng import IndexRange, Region, functional
from dist_rng.regions.placements import slice_of
from testkit import assert_bitwise, run_ranks

SHAPE = (9, 14)
PARTS = {
    "a box": Region.box(SHAPE, (2, 3), (5, 7)),
    "rows": Region.box(SHAPE, (4, 0), (5, 14)),
    "two bands": Region.full(SHAPE).select(0, IndexRange(0, 2), IndexRange(6, 9)),
    "a flat range": Region.flat(SHAPE, 11, 100),
    "all": Region.full(SHAPE),
    "nothing": Region.box(SHAPE, (9, 0), (0, 14)),
}
FILLS = {
    "uniform_": (lambda x, r: dist_rng.uniform_(x, r, -1, 3), lambda x: x.uniform_(-1, 3)),
    "normal_": (lambda x, r: dist_rng.normal_(x, r, 2, 3), lambda x: x.normal_(2, 3)),
    "bernoulli_": (lambda x, r: dist_rng.bernoulli_(x, r, 0.3), lambda x: x.bernoulli_(0.3)),
    "exponential_": (lambda x, r: dist_rng.exponential_(x, r, 2), lambda x: x.exponential_(2)),
    "cauchy_": (lambda x, r: dist_rng.cauchy_(x, r, 1, 2), lambda x: x.cauchy_(1, 2)),
    "geometric_": (lambda x, r: dist_rng.geometric_(x, r, 0.2), lambda x: x.geometric_(0.2)),
    "log_normal_": (lambda x, r: dist_rng.log_normal_(x, r), lambda x: x.log_normal_()),
    "randint_": (lambda x, r: dist_rng.randint_(x, r, -4, 9), lambda x: x.random_(-4, 9)),
    "random_": (dist_rng.random_, lambda x: x.random_()),
}


@pytest.mark.parametrize("fills", FILLS.values(), ids=FILLS.keys())
@pytest.mark.parametrize("region", PARTS.values(), ids=PARTS.keys())
def test_a_local_fill_equals_its_part_of_the_global_fill(fills, region):
    fill, torch_fill = fills
    torch.manual_seed(0)
    expected, state = torch_fill(torch.zeros(SHAPE)), torch.get_rng_state()
    torch.manual_seed(0)
    shape = (region.numel,) if region.windows is not None else region.grid_shape
    local = torch.zeros(shape)
    assert fill(local, region) is local
    assert_bitwise(local, slice_of(expected, region).reshape(shape))
    assert torch.equal(torch.get_rng_state(), state)


def test_bernoulli_takes_local_probabilities():
    region, chances = PARTS["a box"], torch.linspace(0, 1, 126).view(SHAPE)
    torch.manual_seed(0)
    expected = torch.zeros(SHAPE).bernoulli_(chances)
    torch.manual_seed(0)
    local = dist_rng.bernoulli_(torch.zeros(5, 7), region, slice_of(chances, region))
    assert_bitwise(local, slice_of(expected, region))


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_dropout_and_its_gradient_are_one_devices(p):
    region = PARTS["a box"]
    whole = torch.linspace(1, 2, 126).view(SHAPE).requires_grad_()
    torch.manual_seed(0)
    expected = F.dropout(whole, p)
    expected.sum().backward()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    part = slice_of(whole.detach(), region).clone().requires_grad_()
    result = dist_rng.dropout(part, region, p)
    assert torch.equal(torch.get_rng_state(), state)
    result.sum().backward()
    assert_bitwise(result.detach(), slice_of(expected.detach(), region))
    assert_bitwise(part.grad, slice_of(whole.grad, region))
    assert dist_rng.dropout(part, region, p, training=False) is part


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
def test_attention_and_its_gradients_are_one_devices(options):
    """Of a part of the heads, with the keys and values of their groups."""
    groups = 2 if options.get("enable_gqa") else 4
    whole = [torch.randn(2, heads, 6, 8, requires_grad=True) for heads in (4, groups, groups)]
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(*whole, dropout_p=0.3, **options)
    state = torch.get_rng_state()
    local = [x.detach()[:, x.shape[1] // 2 :].clone().requires_grad_() for x in whole]
    weights = Region.box((2, 4, 6, 6), (0, 2, 0, 0), (2, 2, 6, 6))
    torch.manual_seed(0)
    result = dist_rng.scaled_dot_product_attention(*local, weights, dropout_p=0.3, **options)
    assert_bitwise(result, expected[:, 2:])
    assert torch.equal(torch.get_rng_state(), state)
    result.square().sum().backward()
    expected.square().sum().backward()
    for part, of_one_device in zip(local, whole, strict=True):
        assert_bitwise(part.grad, of_one_device.grad[:, of_one_device.shape[1] // 2 :])


@pytest.mark.parametrize(
    ("part", "dropout_p"),
    [
        (((2, 0, 0, 0), (0, 4, 6, 6)), 0.3),
        (((0, 4, 0, 0), (2, 0, 6, 6)), 0.3),
        (((2, 0, 0, 0), (0, 4, 6, 6)), 1.0),
    ],
    ids=["no batch", "no heads", "everything dropped"],
)
def test_the_generator_advances_where_a_rank_has_no_part_of_the_attention(part, dropout_p):
    whole = torch.randn(2, 4, 6, 8)
    torch.manual_seed(0)
    F.scaled_dot_product_attention(whole, whole, whole, dropout_p=dropout_p)
    state = torch.get_rng_state()
    first, sizes = part
    local, weights = torch.empty(*sizes[:3], 8), Region.box((2, 4, 6, 6), first, sizes)
    torch.manual_seed(0)
    result = dist_rng.scaled_dot_product_attention(
        local, local, local, weights, dropout_p=dropout_p
    )
    assert result.shape == local.shape
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_with_dropout_of_a_gpus_numbers_is_refused():
    x, weights = torch.randn(1, 2, 4, 4), Region.full((1, 2, 4, 4))
    with (
        dist_rng.single_device_rng(geometry=dist_rng.Geometry.H100),
        pytest.raises(ValueError, match=r"expected dropout_p=0, got 0\.5.*write attention as"),
    ):
        dist_rng.scaled_dot_product_attention(x, x, x, weights, dropout_p=0.5)


def test_an_explicit_generator_is_advanced_alone():
    sharded, single = (torch.Generator().manual_seed(5) for _ in range(2))
    before = torch.get_rng_state()
    dist_rng.normal_(torch.zeros(5, 7), PARTS["a box"], generator=sharded)
    torch.zeros(SHAPE).normal_(generator=single)
    assert torch.equal(sharded.get_state(), single.get_state())
    assert torch.equal(torch.get_rng_state(), before)


def test_meta_tensors_draw_nothing():
    before = torch.get_rng_state()
    dist_rng.uniform_(torch.empty(SHAPE, device="meta"), Region.full(SHAPE))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: dist_rng.uniform_(torch.zeros(3, 3), PARTS["a box"]),
            ValueError,
            r"expected .* shape \(5, 7\), got \(3, 3\)",
        ),
        (
            lambda: dist_rng.uniform_(torch.zeros(88), PARTS["a flat range"]),
            ValueError,
            "89 elements in windows: expected a contiguous local tensor",
        ),
        (
            lambda: dist_rng.dropout(torch.zeros(5, 7), PARTS["a box"], 1.5),
            ValueError,
            "dropout: expected a probability",
        ),
        (
            lambda: dist_rng.normal_(torch.zeros(5, 7, dtype=torch.int64), PARTS["a box"]),
            TypeError,
            "int64",
        ),
        (
            lambda: dist_rng.trunc_normal_(torch.zeros(5, 7), PARTS["a box"]),
            ValueError,
            "35 out of 126 elements: expected the process group",
        ),
    ],
)
def test_a_mismatch_raises_and_draws_nothing(call, error, message):
    before = torch.get_rng_state()
    with pytest.raises(error, match=message):
        call()
    assert torch.equal(torch.get_rng_state(), before)


def one_device_truncated(bounds):
    torch.manual_seed(6)
    full = nn.init.trunc_normal_(torch.zeros(SHAPE), 0.0, 1.0, *bounds)
    return full, torch.get_rng_state()


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (-0.4, 0.9), (0.5, 3.0)])
def test_trunc_normal_of_a_replica_needs_no_group(bounds):
    expected, state = one_device_truncated(bounds)
    torch.manual_seed(6)
    local = dist_rng.trunc_normal_(torch.zeros(SHAPE), Region.full(SHAPE), 0.0, 1.0, *bounds)
    assert_bitwise(local, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_trunc_normal_draws_from_an_explicit_generator():
    expected = nn.init.trunc_normal_(torch.zeros(SHAPE), generator=torch.Generator().manual_seed(3))
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    local = dist_rng.trunc_normal_(torch.zeros(SHAPE), Region.full(SHAPE), generator=generator)
    assert_bitwise(local, expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draw", [lambda x: x.uniform_(-1, 3), lambda x: x.normal_(2, 3)])
def test_every_draw_of_trunc_normal_is_drawn_by_region(draw):
    """torch 2.11 composes it of uniform_, later releases of normal_."""
    torch.manual_seed(0)
    expected = draw(torch.zeros(SHAPE))
    torch.manual_seed(0)
    with functional._DrawByRegion(PARTS["a box"], None, None):
        local = draw(torch.zeros(5, 7))
    assert_bitwise(local, slice_of(expected, PARTS["a box"]))


@pytest.mark.ranks
def test_trunc_normal_of_parts_agrees_over_the_group():
    def body(bounds):
        import torch.distributed as dist

        import dist_rng

        start = 4 * dist.get_rank()
        region = Region.box(SHAPE, (start, 0), (4 + dist.get_rank(), 14))
        torch.manual_seed(6)
        local = torch.zeros(region.grid_shape)
        dist_rng.trunc_normal_(local, region, 0.0, 1.0, *bounds, group=dist.group.WORLD)
        return local, torch.get_rng_state()

    for bounds in [(-2.0, 2.0), (-0.4, 0.9), (0.5, 3.0)]:
        expected, state = one_device_truncated(bounds)
        results = run_ranks(body, 2, bounds)
        assert_bitwise(torch.cat([local for local, _ in results]), expected)
        assert all(torch.equal(end, state) for _, end in results)
