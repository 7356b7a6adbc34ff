"""Attention with drawn masks, heads, lengths and orders: values and gradients of one device."""

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from plan_api import AttentionMask
from plan_api.context_parallel import AttentionCall, SequenceSharding, tiles
from plan_api.context_parallel.attention import IMPLEMENTATIONS
from plan_api.context_parallel.dropout import AttentionDropout
from plan_api.context_parallel.kernels import cpu
from testkit import CommLog, run_ranks

pytestmark = pytest.mark.ranks

BATCH = 2


@dataclass(frozen=True)
class Case:
    """An attention; of ``heads`` there are as many for each rank."""

    method: str
    order: str
    mask: AttentionMask
    length: int
    heads: int
    groups: int
    features: tuple[int, int]
    has_sinks: bool
    dropout_p: float


@st.composite
def cases(draw, masks):
    method = draw(st.sampled_from(list(IMPLEMENTATIONS)))
    order = "contiguous" if method == "ulysses" else draw(st.sampled_from(["zigzag", "contiguous"]))
    length = draw(st.integers(1, 40))
    return Case(
        method,
        order,
        draw(masks(length, BATCH)),
        length,
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 3])),
        draw(st.sampled_from([(8, 8), (8, 4), (4, 8)])),
        draw(st.booleans()),
        draw(st.sampled_from([0.0, 0.0, 0.4])),
    )


def one_device(query, key, value, sinks, mask, dropout_p):
    """Computes attention by torch, which has no sinks: with them by its definition."""
    if sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, scale=0.3, enable_gqa=True
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    scores = (query @ key.mT * 0.3).masked_fill(~mask, -torch.inf)
    sinks = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return F.dropout(weights, dropout_p) @ value


def differences(case, mesh, order=None, **axes):
    """Returns the largest differences to one device, and whether both drew as many numbers."""
    from dist_rng import Region

    torch.manual_seed(1)
    ranks, length = dist.get_world_size(), case.length
    key_heads = case.heads * ranks
    heads = key_heads * case.groups
    features, value_features = case.features
    whole = [
        torch.randn(BATCH, number, length, size, dtype=torch.float64)
        for number, size in (
            (heads, features), (key_heads, features), (key_heads, value_features),
        )
    ]  # fmt: skip
    upstream = torch.randn(BATCH, heads, length, value_features, dtype=torch.float64)
    sinks = torch.randn(heads, dtype=torch.float64) if case.has_sinks else None
    inputs = [one for one in (*whole, sinks) if one is not None]
    before = torch.get_rng_state()
    single = [one.clone().requires_grad_() for one in inputs]
    dense = case.mask.dense(length)
    expected = one_device(*single[:3], single[3] if case.has_sinks else None, dense, case.dropout_p)
    expected.backward(upstream)
    after = torch.get_rng_state()
    torch.set_rng_state(before)

    order = order or SequenceSharding(case.order, ranks).token_order(length)
    own = order.positions().chunk(ranks)[dist.get_rank()]

    def local(tensor):
        padded = F.pad(tensor, (0, 0, 0, order.padded_length - length), value=1e3)
        return padded[:, :, own]

    dropout = None
    if case.dropout_p:
        dropout = AttentionDropout(case.dropout_p, Region.full((BATCH, heads, length, length)))
    call = AttentionCall(mesh, 0, order, case.mask, 0.3, "attention", dropout=dropout, **axes)
    parts = [local(one).requires_grad_() for one in inputs[:3]]
    if case.has_sinks:
        parts.append(sinks.clone().requires_grad_())
    out = IMPLEMENTATIONS[case.method](*parts[:3], call, *parts[3:])
    real = own < length
    out[:, :, real].backward(local(upstream)[:, :, real])
    compared = [(out, expected)]
    compared += [(one.grad, other.grad) for one, other in zip(parts[:3], single[:3], strict=True)]
    found = [(one - local(other))[:, :, real].abs().sum().item() for one, other in compared]
    if case.has_sinks:
        dist.all_reduce(parts[3].grad)
        found.append((parts[3].grad - single[3].grad).abs().max().item())
    padding = [one.grad[:, :, ~real].abs().sum().item() for one in parts[1:3]]
    return [*found, *padding], torch.equal(torch.get_rng_state(), after)


def check_cases(drawn, call_pairs, causal_sizes):
    tiles._CALL_PAIRS = call_pairs
    cpu.CpuFlash.causal_queries, cpu.CpuFlash.causal_strips = causal_sizes
    tiles.block_tiles.cache_clear()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [differences(case, mesh) for case in drawn]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_drawn_attention_equals_one_device(ranks, masks):
    """In float64 to 1e-12: outputs, gradients, of sinks too, and the state of random numbers."""

    # Without shrinking: each example is many cases, and the message names the one that differs.
    @settings(
        max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), database=None,
        phases=[Phase.generate],
    )  # fmt: skip
    @given(
        st.lists(cases(masks), min_size=20, max_size=30),
        st.sampled_from([0, 20]),
        st.sampled_from([(1024, (64, 128)), (7, (1, 3))]),
    )
    def check(drawn, call_pairs, causal_sizes):
        for found in run_ranks(check_cases, ranks, drawn, call_pairs, causal_sizes):
            for case, (largest, same_state) in zip(drawn, found, strict=True):
                assert all(one < 1e-12 for one in largest), (case, largest)  # no nan either
                assert same_state, case

    check()


WINDOW_OF_DOCUMENTS = AttentionMask.of_lengths([9, 14, 3]) & AttentionMask(window=6)
MASKS = (
    AttentionMask(causal=True), AttentionMask(), WINDOW_OF_DOCUMENTS,
    AttentionMask(tokens=((0, 20), (5, 26))),
)  # fmt: skip


@pytest.mark.parametrize(
    "shape", [(1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str
)
def test_ulysses_within_a_ring_equals_one_device(shape):
    """The ring along the first axis, heads along the second, in zig-zag order.

    It is the ring's, divided among the second axis, or that of all ranks.
    """

    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("across", "within"))
        divided = SequenceSharding("zigzag", shape[0]).token_order(26).divided(shape[1])
        of_all = SequenceSharding("zigzag", shape[0] * shape[1]).token_order(26)
        found = []
        for order, mask in itertools.product((divided, of_all), MASKS):
            for has_sinks, dropout_p in ((False, 0.0), (True, 0.3)):
                case = Case("ulysses", "", mask, 26, 1, 2, (8, 4), has_sinks, dropout_p)
                found.append(differences(case, mesh, order, ulysses_axis=1))
        return found

    for found in run_ranks(check, shape[0] * shape[1]):
        for largest, same_state in found:
            assert all(one < 1e-12 for one in largest)
            assert same_state


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_window_sends_its_keys_to_the_next_rank_only(ranks):
    """Forward the last window - 1 keys of each rank but the last; backward their gradients too."""

    def check():
        mesh, rank = init_device_mesh("cpu", (ranks,)), dist.get_rank()
        mask, length = AttentionMask(causal=True, window=4), 8 * ranks
        order = SequenceSharding("contiguous", ranks).token_order(length)
        call = AttentionCall(mesh, 0, order, mask, None, "attention")
        parts = [torch.randn(BATCH, heads, 8, 8).requires_grad_() for heads in (4, 2, 2)]
        with CommLog() as forward:
            out = IMPLEMENTATIONS["ring"](*parts, call)
        with CommLog() as backward:
            out.sum().backward()
        sent = BATCH * 2 * 3 * (8 + 8) * 4 * (rank < ranks - 1)
        returned = BATCH * 2 * 3 * (8 + 8) * 4 * (rank > 0)
        assert forward.wire_bytes() == sent
        assert forward.counts().get("send", 0) == (rank < ranks - 1)
        assert backward.wire_bytes() == sent + returned
        assert backward.counts().get("send", 0) == (rank < ranks - 1) + (rank > 0)

    run_ranks(check, ranks)


def test_documents_on_one_rank_send_nothing():
    def check():
        mesh = init_device_mesh("cpu", (2,))
        order = SequenceSharding("contiguous", 2).token_order(16)
        call = AttentionCall(mesh, 0, order, AttentionMask.of_lengths([5, 3, 8]), None, "attention")
        parts = [torch.randn(1, 2, 8, 8).requires_grad_() for _ in range(3)]
        with CommLog() as log:
            IMPLEMENTATIONS["ring"](*parts, call).sum().backward()
        return log.counts()

    assert run_ranks(check, 2) == [{}, {}]
