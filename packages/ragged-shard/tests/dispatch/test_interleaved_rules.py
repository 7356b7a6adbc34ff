"""Operators on interleaved shards: fused projections as on one device, and no communication."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ragged_shard
from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard, strict
from testkit import TORCH_RELEASE, CommLog, assert_bitwise, assert_close, run_ranks

pytestmark = pytest.mark.ranks

R = Replicate()


def operand(*shape):
    return ((torch.arange(torch.Size(shape).numel()).reshape(shape) * 37) % 17 - 8).float()


def replica(tensor, mesh):
    return DTensor.from_local(tensor, mesh, [R], run_check=False)


# name: (function of x (12, 8) under InterleavedShard(0, 3), placement of the result)
PRESERVED = {
    "neg": (torch.neg, InterleavedShard(0, 3)),
    "add": (lambda x: x + x, InterleavedShard(0, 3)),
    "zeros_like": (torch.zeros_like, InterleavedShard(0, 3)),
    "to": (lambda x: x.to(torch.float64), InterleavedShard(0, 3)),
    "t": (torch.t, InterleavedShard(1, 3)),
    "transpose": (lambda x: x.transpose(0, 1), InterleavedShard(1, 3)),
    "sum of rows": (lambda x: x.sum(1), InterleavedShard(0, 3)),
    "sum of columns": (lambda x: x.sum(0), Partial()),
    "sum": (torch.sum, Partial()),
    "amax": (lambda x: x.amax(0), Partial("max")),
    "softmax": (lambda x: x.softmax(1), InterleavedShard(0, 3)),
    "foreach": (lambda x: torch._foreach_mul([x, x], 2.0)[1], InterleavedShard(0, 3)),
    "in place": (lambda x: x.clone().mul_(2), InterleavedShard(0, 3)),
    "view behind": (lambda x: x.view(12, 2, 4), InterleavedShard(0, 3)),
    "view before": (lambda x: x.view(1, 12, 8), InterleavedShard(1, 3)),
    "unflatten": (lambda x: x.view(3, 4, 8), InterleavedShard(1, 1)),
    "heads": (lambda x: x.view(3, 2, 2, 8), InterleavedShard(1, 1)),
    "flattened again": (lambda x: x.view(3, 4, 8).view(12, 8), InterleavedShard(0, 3)),
    "split in two": (lambda x: torch.cat([x, x]).view(2, 12, 8), InterleavedShard(1, 3)),
    "joined with a dim before": (
        lambda x: torch.cat([x, x]).view(2, 12, 8).view(24, 8),
        InterleavedShard(0, 6),
    ),
    "chunks of chunks": (lambda x: torch.cat([x, x]).view(6, 4, 8), InterleavedShard(1, 1)),
    "batch flattened": (
        lambda x: x.view(3, 4, 8).transpose(0, 2).reshape(32, 3),
        InterleavedShard(0, 8),
    ),
    "first chunk": (lambda x: x.chunk(3)[0], InterleavedShard(0, 1)),
    "last chunk": (lambda x: x.split(4)[2], InterleavedShard(0, 1)),
    "two chunks": (lambda x: x.split([8, 4])[0], InterleavedShard(0, 2)),
    "split and joined": (lambda x: torch.cat(x.split(4)), InterleavedShard(0, 3)),
    "joined in parts": (lambda x: torch.cat(x.split([8, 4])), InterleavedShard(0, 3)),
    "joined twice": (lambda x: torch.cat([x, x]), InterleavedShard(0, 6)),
    "joined beside": (lambda x: torch.cat([x, x], 1), InterleavedShard(0, 3)),
    "rows of a chunk": (lambda x: x.chunk(3)[1][:, 2:5], InterleavedShard(0, 1)),
    "split the other dim": (lambda x: x.split(4, 1)[1], InterleavedShard(0, 3)),
}


def preserved(name):
    function, expected = PRESERVED[name]
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(operand(12, 8), mesh, [InterleavedShard(0, 3)])
    with CommLog() as log, ragged_shard.strict():
        result = function(x)
    log.assert_counts({})
    assert result.placements == (expected,), result.placements
    assert_close(result.full_tensor(), function(operand(12, 8)), rtol=1e-6, atol=1e-6, what=name)


@pytest.mark.parametrize("name", PRESERVED)
def test_what_treats_rows_alike_and_what_falls_apart_between_chunks(name):
    run_ranks(preserved, 2, name)


def uneven():
    """Chunks of 3 rows on 2 ranks: 2 and 1 of each."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(operand(9, 8), mesh, [InterleavedShard(0, 3)])
    with CommLog() as log, ragged_shard.strict():
        doubled = x * 2
        first, *_ = x.chunk(3)
        product = x @ replica(operand(8, 4), mesh)
    log.assert_counts({})
    assert_bitwise(doubled.full_tensor(), operand(9, 8) * 2, "doubled")
    assert_bitwise(first.full_tensor(), operand(9, 8)[:3], "chunk")
    assert_bitwise(product.full_tensor(), operand(9, 8) @ operand(8, 4), "product")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ragged_shard.RaggedShardFallbackWarning)
        assert_bitwise(x.mean().full_tensor(), operand(9, 8).mean(), "mean")
        assert_bitwise(x.sum(0).full_tensor(), operand(9, 8).sum(0), "sum")


def test_chunks_that_are_cut_unevenly():
    run_ranks(uneven, 2)


def in_units():
    """Of 3 heads of 4 rows the ranks have 2 and 1."""
    mesh = init_device_mesh("cpu", (2,))
    heads = InterleavedShard(0, 1, unit=4)
    x, weight = operand(12, 8), operand(8, 12)
    placed = distribute_tensor(x, mesh, [heads])
    columns = distribute_tensor(weight, mesh, [InterleavedShard(1, 1, unit=4)])
    cases = {
        "add": (placed + placed, x + x, heads),
        "t": (placed.t(), x.t(), InterleavedShard(1, 1, unit=4)),
        "product of rows": (placed @ replica(weight, mesh), x @ weight, heads),
        "contracted": (columns @ placed, weight @ x, Partial()),
        "behind": (placed.view(12, 2, 4), x.view(12, 2, 4), heads),
        "foreach": (torch._foreach_mul([placed], 2.0)[0], x * 2, heads),
        "fused": (
            distribute_tensor(x, mesh, [InterleavedShard(0, 2, unit=2)]).chunk(2)[1],
            x.chunk(2)[1],
            InterleavedShard(0, 1, unit=2),
        ),
    }
    with CommLog() as log, ragged_shard.strict():
        norm = torch.nn.utils.get_total_norm([placed, columns])
    log.assert_counts({"all_reduce": 1})
    for name, (found, expected, placement) in cases.items():
        assert found.placements == (placement,), (name, found.placements)
        assert_close(found.full_tensor(), expected, rtol=1e-6, atol=1e-6, what=name)
    expected = torch.nn.utils.get_total_norm([x, weight])
    assert_close(norm.full_tensor(), expected, rtol=1e-6, atol=1e-6, what="norm")
    empty = distribute_tensor(x, mesh, [InterleavedShard(0, 1, unit=12)])  # of the second rank
    with CommLog() as log, ragged_shard.strict():
        norm = torch.nn.utils.get_total_norm([empty, placed])
    log.assert_counts({"all_reduce": 1})
    expected = torch.nn.utils.get_total_norm([x, x])
    assert_close(norm.full_tensor(), expected, rtol=1e-6, atol=1e-6, what="norm of empty shards")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ragged_shard.RaggedShardFallbackWarning)
        largest = torch.nn.utils.get_total_norm([empty, placed], float("inf")).full_tensor()
        assert_bitwise(largest, x.abs().max(), "largest")
        for name, function in {
            "mean": torch.mean,
            "heads": lambda x: x.view(3, 4, 8),
            "cat": lambda x: torch.cat([x, x]),
            "softmax": lambda x: x.softmax(0),
        }.items():
            found = function(placed).full_tensor()
            assert_close(found, function(x), rtol=1e-6, atol=1e-6, what=name)


def test_units_are_kept_or_gathered():
    run_ranks(in_units, 2)


def mixed():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(operand(4, 12), mesh, [InterleavedShard(1, 3)])
    bias = operand(12)
    cases = {
        "replica": (replica(operand(4, 12), mesh), {}),
        "bias": (replica(bias, mesh), {}),
        "row": (replica(bias.view(1, 12), mesh), {}),
        "column": (replica(operand(4, 1), mesh), {}),
        "scalar": (replica(torch.tensor(2.0), mesh), {}),
        "shard": (distribute_tensor(operand(4, 12), mesh, [Shard(1)]), {"all_to_all": 1}),
        "interleaved": (
            distribute_tensor(operand(4, 12), mesh, [InterleavedShard(1, 2)]),
            {"all_to_all": 1},
        ),
        "bias like it": (distribute_tensor(bias, mesh, [InterleavedShard(0, 3)]), {}),
    }
    for name, (other, counts) in cases.items():
        with CommLog() as log, ragged_shard.strict():
            result = x * other
        log.assert_counts(counts)
        assert result.placements == (InterleavedShard(1, 3),), name
        assert_bitwise(result.full_tensor(), operand(4, 12) * other.full_tensor(), name)


def test_other_operands_are_brought_to_the_interleaved_one():
    run_ranks(mixed, 2)


def products():
    mesh = init_device_mesh("cpu", (2,))
    a, b = operand(4, 12), operand(12, 6)
    rows, columns, inner = InterleavedShard(0, 2), InterleavedShard(1, 3), InterleavedShard(1, 3)
    cases = [
        (rows, R, rows, {}),
        (R, columns, columns, {}),
        (inner, InterleavedShard(0, 3), Partial(), {}),
        (inner, R, Partial(), {}),
        (inner, Shard(0), Partial(), {"all_to_all": 1}),
        (R, InterleavedShard(0, 3), Partial(), {}),
    ]
    for left, right, expected, counts in cases:
        x, y = distribute_tensor(a, mesh, [left]), distribute_tensor(b, mesh, [right])
        with CommLog() as log, ragged_shard.strict():
            result = x @ y
        log.assert_counts(counts)
        assert result.placements == (expected,), (left, right, result.placements)
        assert_bitwise(result.full_tensor(), a @ b, f"{left} @ {right}")


def test_products_keep_rows_and_columns_and_contract_alike():
    run_ranks(products, 2)


class Attention(nn.Module):
    """Multi-head attention with one fused projection, written for one device."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).reshape(batch, length, -1))


def attention():
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain, parallel = Attention(), Attention()
    parallel.load_state_dict(plain.state_dict())
    placements = {
        "qkv.weight": InterleavedShard(0, 3),
        "qkv.bias": InterleavedShard(0, 3),
        "out.weight": Shard(1),
        "out.bias": R,
    }
    for name, placement in placements.items():
        path, leaf = name.split(".")
        module = getattr(parallel, path)
        value = distribute_tensor(getattr(module, leaf).detach(), mesh, [placement])
        module.register_parameter(leaf, nn.Parameter(value))
    # torch 2.11 cannot flatten a batch of several with sharded heads, as their gradients are.
    x = torch.randn(1 if torch.__version__ < "2.12" else 2, 5, 16)
    with CommLog() as log, ragged_shard.strict():
        result = parallel(replica(x, mesh))
    log.assert_counts({"all_reduce": 1} if result.placements == (R,) else {})
    expected = plain(x)
    assert_close(result.full_tensor(), expected, rtol=1e-5, atol=1e-5, what="output")
    expected.square().sum().backward()
    loss = result.redistribute(placements=[R]).square().sum()
    with CommLog() as log, ragged_shard.strict():
        loss.backward()
    log.assert_counts({})
    for (name, p), q in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-5, what=name)


def test_tensor_parallel_attention_with_a_fused_projection_equals_one_device():
    run_ranks(attention, 2)


def attention_with_a_cut_batch():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain, parallel = Attention(), Attention()
    parallel.load_state_dict(plain.state_dict())
    placements = [InterleavedShard(0, 3), InterleavedShard(0, 3), Shard(1), R]
    for (name, param), placement in zip(plain.named_parameters(), placements, strict=True):
        path, leaf = name.split(".")
        value = distribute_tensor(param.detach(), mesh, [R, placement])
        getattr(parallel, path).register_parameter(leaf, nn.Parameter(value))
    x = torch.randn(4, 5, 16)
    placed = distribute_tensor(x, mesh, [Shard(0), R])
    with CommLog() as log, ragged_shard.strict():
        result = parallel(placed)
        loss = result.redistribute(placements=[Shard(0), R]).square().sum()
        loss.backward()
    log.assert_counts({"all_reduce": 1 + (result.placements != (Shard(0), Partial()))})
    plain(x).square().sum().backward()
    for (name, p), q in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        assert_close(q.grad.full_tensor(), p.grad, rtol=1e-4, atol=1e-5, what=name)


@pytest.mark.skipif(
    TORCH_RELEASE < (2, 12), reason="torch 2.11 cannot flatten a batch with sharded heads"
)
def test_heads_stay_cut_where_another_axis_cuts_the_batch():
    run_ranks(attention_with_a_cut_batch, 4)


def strided_twice():
    """What a view of batch and heads leaves is a `_StridedShard` to torch, and moves as one."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(operand(4, 6, 2), mesh, [Shard(0), InterleavedShard(1, 1)])
    with CommLog() as log, ragged_shard.strict():
        flat = x.view(24, 2)
    log.assert_counts({})
    assert flat.placements == (Shard(0), InterleavedShard(0, 2))
    strided = flat.redistribute(placements=[Shard(0), _StridedShard(0, split_factor=2)])
    assert_bitwise(strided.to_local(), flat.to_local(), "under torch's name")
    assert_bitwise(flat.full_tensor(), operand(4, 6, 2).view(24, 2), "whole")
    assert_bitwise(flat.view(4, 6, 2).full_tensor(), operand(4, 6, 2), "back")


def test_batch_and_heads_in_one_dim_are_what_torch_calls_a_strided_shard():
    run_ranks(strided_twice, 4)


def sharded_sequence():
    """Queries, keys and values of a sequence that another axis shards, from a linear layer."""
    mesh, whole = init_device_mesh("cpu", (2, 2)), operand(2, 6, 24)
    rows = distribute_tensor(whole, mesh, [Shard(1), InterleavedShard(2, 3)])
    with CommLog() as log, ragged_shard.strict():
        flat = rows.view(12, 24)  # as nn.Linear does, and back
        back = flat.view(2, 6, 24)
        heads = back.view(2, 6, 3, 4, 2)
    log.assert_counts({})
    assert flat.placements == (_StridedShard(0, split_factor=2), InterleavedShard(1, 3))
    assert back.placements == rows.placements
    assert heads.placements == (Shard(1), InterleavedShard(3, 1))
    assert_bitwise(heads.full_tensor(), whole.view(2, 6, 3, 4, 2), "heads")
    columns = distribute_tensor(whole, mesh, [Shard(1), InterleavedShard(2, 3)])
    with ragged_shard.strict(), pytest.raises(RuntimeError, match="forbids"):
        columns.view(2, 144)  # the sequence is flattened into the interleaved dim


def test_columns_stay_cut_where_another_axis_cuts_the_sequence():
    run_ranks(sharded_sequence, 4)


def two_interleaved_axes():
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [InterleavedShard(0, 3), InterleavedShard(1, 2)]
    x = distribute_tensor(operand(12, 8), mesh, placements)
    ragged_shard.reset_fallbacks()
    with pytest.warns(ragged_shard.RaggedShardFallbackWarning, match="mul"):
        result = x * 2
    assert_bitwise(result.full_tensor(), operand(12, 8) * 2, "two axes")
    with ragged_shard.strict(), pytest.raises(RuntimeError, match="forbids"):
        x * 2


def test_a_second_interleaved_axis_is_not_gathered_in_silence():
    run_ranks(two_interleaved_axes, 4)


def ragged_on_top():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    placements = [RaggedShard((0,), (1, 2)), InterleavedShard(0, 3)]
    x = distribute_tensor(operand(12, 8), mesh, placements)
    with CommLog() as log, ragged_shard.strict():
        doubled = x * 2 + x
        torch._foreach_mul_([x], 3.0)
    log.assert_counts({})
    assert doubled.placements == x.placements == tuple(placements)
    assert_bitwise(doubled.full_tensor(), operand(12, 8) * 3, "doubled")
    assert_bitwise(x.full_tensor(), operand(12, 8) * 3, "in place")
    total = x.sum()
    assert_bitwise(total.full_tensor(), operand(12, 8).sum() * 3, "sum")


def test_a_ragged_axis_over_an_interleaved_one():
    run_ranks(ragged_on_top, 4)


def along_the_cut_dim():
    mesh = init_device_mesh("cpu", (2,))
    ragged_shard.reset_fallbacks()
    x = distribute_tensor(operand(12, 8), mesh, [InterleavedShard(0, 3)])
    with pytest.warns(ragged_shard.RaggedShardFallbackWarning, match="_softmax"):
        result = x.softmax(0)
    assert_close(
        result.full_tensor(), operand(12, 8).softmax(0), rtol=1e-6, atol=1e-6, what="softmax"
    )

    other = distribute_tensor(operand(4, 8), mesh, [InterleavedShard(0, 2)])
    with pytest.warns(ragged_shard.RaggedShardFallbackWarning, match="cat"):
        result = torch.cat([x, other])  # chunks of 4 rows and of 2
    assert_bitwise(result.full_tensor(), torch.cat([operand(12, 8), operand(4, 8)]), "cat")
    with pytest.warns(ragged_shard.RaggedShardFallbackWarning, match="view"):
        result = x.view(3, 1, 4, 8)  # one head for two ranks
    assert_bitwise(result.full_tensor(), operand(12, 8).view(3, 1, 4, 8), "view")
    # Chunks of 3 rows: 4 rows on one rank and 2 on the other, though 6 would make 3 and 3.
    uneven = distribute_tensor(operand(6, 8), mesh, [InterleavedShard(0, 2)])
    with pytest.warns(ragged_shard.RaggedShardFallbackWarning, match="mean"):
        result = uneven.mean(0)
    assert_close(result.full_tensor(), operand(6, 8).mean(0), rtol=1e-6, atol=1e-6, what="mean")


def test_what_needs_the_whole_cut_dim_gathers_and_says_so():
    run_ranks(along_the_cut_dim, 2)


def scaled_dot_product():
    """Forward only: torch's DTensor has no strategy for the backward on a CPU, sharded or not."""
    mesh = init_device_mesh("cpu", (2,))
    fused = operand(2, 5, 48) / 8
    for placement in (InterleavedShard(2, 3), RaggedShard((0,), (1, 1))):
        x = distribute_tensor(fused, mesh, [placement])

        def attend(tensor, **options):
            heads = (part.view(2, 5, 4, 4).transpose(1, 2) for part in tensor.chunk(3, -1))
            return nn.functional.scaled_dot_product_attention(*heads, **options)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ragged_shard.RaggedShardFallbackWarning)
            result = attend(x)
        assert_close(result.full_tensor(), attend(fused), rtol=1e-5, atol=1e-5, what="attention")
    heads = distribute_tensor(operand(2, 4, 5, 4), mesh, [InterleavedShard(1, 1)])
    attention = nn.functional.scaled_dot_product_attention
    if TORCH_RELEASE < (2, 15):
        with pytest.raises(RuntimeError, match=r"dist_rng\.install"):
            attention(heads, heads, heads, dropout_p=0.5)
        return
    # 2.15 makes it of other operators, of which bernoulli_ draws each shard's own numbers.
    dropped = attention(heads, heads, heads, dropout_p=0.5)
    assert not torch.equal(dropped.full_tensor(), attention(heads, heads, heads).full_tensor())


@pytest.mark.slow  # twenty seconds a rank, in which torch decomposes attention for a strategy
@pytest.mark.skipif(
    TORCH_RELEASE < (2, 12), reason="torch 2.11 has no sharding strategy for attention on CPUs"
)
def test_attention_without_dropout_draws_nothing_and_is_not_refused():
    run_ranks(scaled_dot_product, 2, timeout=240)


def norms_of_a_list():
    mesh = init_device_mesh("cpu", (2, 2))
    value = torch.arange(48.0).reshape(12, 4)
    placed = [
        (StridedRaggedShard((0,), (1, 2), 2), Shard(0)),
        (StridedRaggedShard((0,), (1, 2), 2), InterleavedShard(0, 3)),
        (RaggedShard((0,), (1, 3)), InterleavedShard(1, 2)),
        (RaggedShard((0,), (1, 2)), R),
    ]
    tensors = [distribute_tensor(value, mesh, placements) for placements in placed]
    for given in (tensors, tensors[::-1]):
        with strict(), CommLog() as log:
            norms = torch._foreach_norm(given, 2.0)
        assert not log.calls
        for norm in norms:
            torch.testing.assert_close(norm.full_tensor(), value.norm())


def norms_of_uneven_chunks():
    """Ranks have rows of unequal chunks, or one has none, which no norm of torch's accepts."""
    mesh = init_device_mesh("cpu", (2,))
    for rows, gathers in ((6, False), (2, True)):
        value = torch.arange(4.0 * rows).reshape(rows, 4)
        placed = distribute_tensor(value, mesh, [InterleavedShard(0, 2)])
        assert placed.to_local().shape[0] == ((4, 2) if rows == 6 else (2, 0))[mesh.get_rank()]
        with CommLog() as log, warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=ragged_shard.RaggedShardFallbackWarning)
            [norm] = torch._foreach_norm([placed], float("inf"))
        assert bool(log.calls) == gathers
        torch.testing.assert_close(norm.full_tensor(), value.max())


def test_norms_of_a_list_of_uneven_chunks():
    run_ranks(norms_of_uneven_chunks, 2)


def test_norms_of_a_list_that_is_interleaved_in_part_gather_nothing():
    run_ranks(norms_of_a_list, 4)
