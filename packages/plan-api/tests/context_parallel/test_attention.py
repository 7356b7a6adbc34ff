"""Attention over a sharded sequence: values and gradients of one device, and collectives."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as native

from plan_api import AttentionMask
from plan_api.context_parallel import AttentionCall, SequenceSharding
from plan_api.context_parallel.attention import IMPLEMENTATIONS
from testkit import CommLog, run_ranks

pytestmark = pytest.mark.ranks

BATCH, HEADS, LENGTH, FEATURES = 2, 8, 16, 8
CASES = [
    (method, order, causal, kv_heads)
    for method in IMPLEMENTATIONS
    for order in (("contiguous",) if method == "ulysses" else ("contiguous", "zigzag"))
    for causal in (True, False)
    for kv_heads in (8, 4)
]


def inputs(kv_heads, dtype=torch.float64):
    torch.manual_seed(0)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(BATCH, n, LENGTH, FEATURES, dtype=torch.float64).to(dtype) for n in heads]


def own_shard(mesh, order, tensor):
    """Returns this rank's shard, with the strides of transformers: heads after the sequence."""
    positions = order.positions().chunk(order.ranks)[mesh.get_local_rank()]
    return tensor[:, :, positions].transpose(1, 2).contiguous().transpose(1, 2)


def run_attention(mesh, method, name, causal, kv_heads, dtype=torch.float64):
    """Returns the output and gradients, and this rank's shards of those of one device."""
    order = SequenceSharding(name, mesh.size()).token_order(LENGTH)
    *whole, upstream = inputs(kv_heads, dtype)
    whole = [one.requires_grad_() for one in whole]
    expected = F.scaled_dot_product_attention(
        *whole, is_causal=causal, scale=0.3, enable_gqa=kv_heads != HEADS
    )
    expected.backward(upstream)
    local = [own_shard(mesh, order, one.detach()).requires_grad_() for one in whole]
    call = AttentionCall(mesh, 0, order, AttentionMask(causal), 0.3, "attention")
    out = IMPLEMENTATIONS[method](*local, call)
    out.backward(own_shard(mesh, order, upstream))
    actual = [out.detach(), *(one.grad for one in local)]
    single = [own_shard(mesh, order, one) for one in (expected, *(one.grad for one in whole))]
    return actual, [one.detach() for one in single]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_and_gradients_equal_one_device(ranks):
    """In float64 to 1e-12."""

    def check():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        found = {}
        for case in CASES:
            pairs = zip(*run_attention(mesh, *case), strict=True)
            found[case] = [(actual - expected).abs().max().item() for actual, expected in pairs]
        return found

    for found in run_ranks(check, ranks):
        for case, differences in found.items():
            assert max(differences) < 1e-12, case


def test_bfloat16_is_accumulated_in_32_bits():
    """In bfloat16, within two roundings of one device's kernel."""

    def check():
        mesh = init_device_mesh("cpu", (2,))
        found = {}
        for method in IMPLEMENTATIONS:
            actual, expected = run_attention(mesh, method, "contiguous", True, 4, torch.bfloat16)
            assert {one.dtype for one in actual} == {torch.bfloat16}
            found[method] = max(
                ((one.double() - other.double()).abs() / (1 + other.double().abs())).max().item()
                for one, other in zip(actual, expected, strict=True)
            )
        return found

    for found in run_ranks(check, 2):
        assert max(found.values()) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("balanced", [False, True], ids=["contiguous", "zigzag"])
def test_the_ring_equals_the_native_ring(balanced):
    """On a CPU torch's runs only below DTensor, with the CPU's kernel as an argument."""

    def check():
        mesh, aten = init_device_mesh("cpu", (2,)), torch.ops.aten
        name = "zigzag" if balanced else "contiguous"
        order, group = SequenceSharding(name, 2).token_order(LENGTH), mesh.get_group()
        actual, _ = run_attention(mesh, "ring", name, True, HEADS)
        query, key, value, upstream = (own_shard(mesh, order, one) for one in inputs(HEADS))
        options, before = native._cp_options, native._cp_options.enable_load_balance
        in_32_bits, options.convert_to_f32 = options.convert_to_f32, False
        options.enable_load_balance = balanced
        try:
            forward = aten._scaled_dot_product_flash_attention_for_cpu
            options_of_kernel = {"is_causal": True, "dropout_p": 0.0, "scale": 0.3}
            out, lse = ring(group, 2, forward, query, key, value, **options_of_kernel)
            backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
            grads = ring_backward(
                group,
                2,
                backward,
                upstream,
                "grad_out",
                query,
                key,
                value,
                out,
                lse,
                **options_of_kernel,
            )
        finally:
            options.enable_load_balance, options.convert_to_f32 = before, in_32_bits
        pairs = zip(actual, (out, *grads), strict=True)
        return max((one - other).abs().max().item() for one, other in pairs)

    ring = native._templated_ring_attention
    ring_backward = native._templated_ring_attention_backward
    assert max(run_ranks(check, 2)) < 1e-12


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_and_bytes(ranks):
    """Ulysses 4 all-to-alls each way, all-gather 1 and 1, the ring N-1 messages and 2N-2."""

    def check():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        order = SequenceSharding("contiguous", ranks).token_order(LENGTH)
        call = AttentionCall(mesh, 0, order, AttentionMask(), None, "attention")
        *whole, upstream = inputs(4)
        found = {}
        for method, attention in IMPLEMENTATIONS.items():
            local = [own_shard(mesh, order, one).requires_grad_() for one in whole]
            with CommLog() as forward:
                out = attention(*local, call)
            with CommLog() as backward:
                out.backward(own_shard(mesh, order, upstream))
            found[method] = [(log.counts(), log.wire_bytes()) for log in (forward, backward)]
        return found

    block = 2 * BATCH * 4 * (LENGTH // ranks) * FEATURES * 8  # bytes of keys and values
    others = ranks - 1
    queries_and_more = 3 * block * others // ranks  # as many heads as two blocks, and one block
    expected = {
        "ring": [
            ({"send": others, "recv": others}, others * block),
            ({"send": 2 * others, "recv": 2 * others}, 2 * others * block),
        ],
        "all-gather": [
            ({"all_gather": 1}, others * block),
            ({"reduce_scatter": 1}, others * block),
        ],
        "ulysses": [({"all_to_all": 4}, queries_and_more)] * 2,
    }
    for found in run_ranks(check, ranks):
        assert found == expected


@pytest.mark.slow
def test_collectives_and_bytes_of_ulysses_within_a_ring():
    """Of two groups of two ranks, and grouped heads: half of the heads of a group's tokens."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2))
        order = SequenceSharding("zigzag", 4).token_order(LENGTH)
        mask = AttentionMask()
        call = AttentionCall(mesh, 0, order, mask, None, "attention", ulysses_axis=1)
        query, key, value = (
            torch.randn(BATCH, heads, LENGTH // 4, FEATURES, dtype=torch.float64).requires_grad_()
            for heads in (4, 2, 2)
        )
        with CommLog() as forward:
            out = IMPLEMENTATIONS["ulysses"](query, key, value, call)
        with CommLog() as backward:
            out.backward(torch.ones_like(out))
        return [(log.counts(), log.wire_bytes()) for log in (forward, backward)]

    head = BATCH * (LENGTH // 4) * FEATURES * 8  # bytes of a head's queries, keys or values
    exchanged = (4 + 2 + 2 + 4) * head // 2  # queries, keys, values and the output
    block = 2 * 2 * head  # keys and values of one of two heads, of the tokens of two ranks
    expected = [
        ({"all_to_all": 4, "send": 1, "recv": 1}, exchanged + block),
        ({"all_to_all": 4, "send": 2, "recv": 2}, exchanged + 2 * block),
    ]
    for found in run_ranks(check, 4):
        assert found == expected
