"""What a rank of a large world sends: closed forms, real ranks, and layers that are alike."""

import math
from dataclasses import replace

import pytest
import torch

from integration.errors import UsageError
from integration.scale.shapes import SHAPES, Depth, shape_named
from integration.scale.strategies import (
    STRATEGIES,
    axes_of,
    distribute,
    strategies_of,
    strategy_named,
)
from integration.scale.traffic import count, count_at
from testkit import CommLog, run_ranks

LLAMA, MIXTRAL, GPT_OSS, DEEPSEEK = SHAPES
HIDDEN, INNER, VOCAB = 64, 96, 128
TINY = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8,
}  # fmt: skip
LAYER = 4 * HIDDEN**2 + 3 * HIDDEN * INNER + 2 * HIDDEN
ROOT = 2 * VOCAB * HIDDEN + HIDDEN
TINY_LLAMA = replace(LLAMA, extra=TINY)
FEW = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
FEW_EXPERTS = replace(DEEPSEEK, extra=DEEPSEEK.extra | FEW)
SEQUENCE = 16


def sent(part):
    return {(each.op, each.axis.name): (each.calls, each.nbytes) for each in part.traffic}


def shard(elements, ranks):
    """Elements of a shard whose bytes are multiples of 16 in bfloat16 and in fp32."""
    return math.ceil(elements / ranks / 8) * 8


@pytest.mark.parametrize("ranks", [pytest.param(64, marks=pytest.mark.slow), 16384])
def test_fully_shard_sends_what_its_buffers_say(ranks):
    layers = 5
    counted = count(
        TINY_LLAMA, strategy_named("FSDP"), ranks, depth=Depth(layers, 0), sequence=SEQUENCE
    )
    of_layer, of_root = shard(LAYER, ranks), shard(ROOT, ranks)
    # In bfloat16; layers are gathered again in backward, the root is not.
    gathered = (ranks - 1) * 2 * (2 * layers * of_layer + of_root)
    reduced = (ranks - 1) * 4 * (layers * of_layer + of_root)
    assert sent(counted.whole) == {
        ("all_gather", "shard"): (2 * layers + 1, gathered),
        ("reduce_scatter", "shard"): (layers + 1, reduced),
    }
    assert counted.whole.parameters <= 4 * (layers * of_layer + of_root)  # without its padding


def test_replicas_add_one_reduction_of_a_shard_for_each_group():
    ranks, layers = 1024, 3
    counted = count(
        TINY_LLAMA, strategy_named("HSDP"), ranks, depth=Depth(layers, 0), sequence=SEQUENCE
    )
    found = sent(counted.whole)
    reduced = layers * (2 * 3 * 4 * shard(LAYER, 256) // 4) + 2 * 3 * 4 * shard(ROOT, 256) // 4
    assert found["all_reduce", "replicate"] == (layers + 1, reduced)
    assert found["all_gather", "shard"][0] == 2 * layers + 1


def test_tensor_parallelism_sends_hidden_states():
    layers, tokens = 4, SEQUENCE
    strategy = strategy_named("TP+SP x FSDP")
    counted = count(TINY_LLAMA, strategy, 16384, depth=Depth(layers, 0), sequence=tokens)
    found = sent(counted.layers[0])
    hidden = 7 * tokens * HIDDEN * 2 // 8  # seven of eight parts, in bfloat16
    # Attention and MLP each gather what they are given and scatter what they make, and backward
    # does the reverse of both.
    assert found["all_gather", "tp"] == (4, 4 * hidden)
    assert found["reduce_scatter", "tp"] == (4, 4 * hidden)


@pytest.mark.parametrize(
    ("shape", "depth"),
    [
        pytest.param(TINY_LLAMA, Depth(4, 0), id="llama", marks=pytest.mark.slow),
        pytest.param(FEW_EXPERTS, Depth(1, 3), id="deepseek-v3", marks=pytest.mark.slow),
    ],
)
def test_layers_of_a_kind_are_alike(shape, depth):
    strategy = strategy_named("FSDP")
    whole = count_at(shape, strategy, 64, depth, sequence=SEQUENCE)
    counted = count(shape, strategy, 64, depth=depth, sequence=SEQUENCE).whole
    assert sent(counted) == sent(whole)
    assert (counted.flops, counted.parameters) == (whole.flops, whole.parameters)


def test_flops_of_a_dense_model_are_six_for_a_weight_and_token_beside_attention():
    part = count_at(TINY_LLAMA, strategy_named("FSDP"), 64, Depth(2, 0), sequence=SEQUENCE)
    matrices = 2 * (LAYER - 2 * HIDDEN) + VOCAB * HIDDEN
    attention = part.flops - 6 * matrices * SEQUENCE
    # Two products in forward; four in backward, and with fused kernels one again.
    products = attention / (2 * 2 * SEQUENCE**2 * HIDDEN)
    assert products in (6, 7)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes_have_the_published_parameters(shape):
    one = Depth(min(1, shape.depth.dense), min(1, shape.depth.experts))

    def parameters(depth):
        return sum(param.numel() for param in shape.build(depth).parameters())

    total = first = parameters(one)
    for kind in ("dense", "experts"):
        if times := getattr(shape.depth, kind):
            total += (times - 1) * (parameters(replace(one, **{kind: 2})) - first)
    # DeepSeek's bias of the router is a buffer of transformers', of 256 in each of 58 layers.
    assert shape.parameters - total == (58 * 256 if shape is DEEPSEEK else 0)


def test_models_without_a_plan_of_the_zoo_are_sharded_by_fully_shard_only():
    assert strategies_of(LLAMA) == strategies_of(MIXTRAL) == STRATEGIES
    assert [strategy.name for strategy in strategies_of(GPT_OSS)] == ["FSDP", "HSDP"]
    assert strategies_of(DEEPSEEK) == strategies_of(GPT_OSS)


@pytest.mark.parametrize(
    ("strategy", "ranks", "sizes"),
    [
        ("FSDP", 60, [("shard", 60, 1)]),
        ("HSDP", 1024, [("replicate", 4, 256), ("shard", 256, 1)]),
        ("HSDP", 64, [("shard", 64, 1)]),
        ("TP x DP", 1024, [("replicate", 128, 8), ("tp", 8, 1)]),
        ("TP+SP x FSDP", 1024, [("shard", 128, 8), ("tp", 8, 1)]),
    ],
)  # fmt: skip
def test_axes_are_outermost_first(strategy, ranks, sizes):
    axes = axes_of(strategy_named(strategy), ranks)
    assert [(axis.name, axis.size, axis.stride) for axis in axes] == sizes


@pytest.mark.parametrize(
    ("strategy", "ranks", "wanted"), [("TP x DP", 60, "8"), ("HSDP", 300, "256")]
)
def test_a_world_that_does_not_divide_is_refused(strategy, ranks, wanted):
    with pytest.raises(UsageError, match=f"expected a multiple of .*{wanted}.*, got {ranks};"):
        axes_of(strategy_named(strategy), ranks)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"expected some of llama3-70b, .* got 'gpt-2'"):
        shape_named("gpt-2")
    with pytest.raises(ValueError, match=r"expected .*FSDP.* got 'DDP'"):
        strategy_named("DDP")


def _real_steps(shape, names):
    """Calls and wire bytes of the second step of each strategy, on this rank."""
    from torch.distributed.device_mesh import init_device_mesh

    found = []
    for name in names:
        strategy = strategy_named(name)
        axes = axes_of(strategy, 2, 2)
        mesh = init_device_mesh(
            "cpu", tuple(axis.size for axis in axes), mesh_dim_names=tuple(a.name for a in axes)
        )
        model = distribute(shape.build(Depth(2, 0)), shape, strategy, mesh).to_empty(device="cpu")
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        tokens = torch.zeros(1, SEQUENCE, dtype=torch.long)
        for _ in range(2):
            with CommLog() as log:
                model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()
        found.append({op: (calls, log.wire_bytes(op)) for op, calls in log.counts().items()})
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names",
    [
        ["FSDP", "TP+SP x DP"],
        pytest.param(["TP x DP"], marks=pytest.mark.slow),  # fewer kinds of the same collectives
    ],
    ids=", ".join,
)
def test_two_real_ranks_send_what_is_counted(names):
    for rank in run_ranks(_real_steps, 2, TINY_LLAMA, names, timeout=120):
        for name, real in zip(names, rank, strict=True):
            part = count_at(
                TINY_LLAMA, strategy_named(name), 2, Depth(2, 0), node=2, sequence=SEQUENCE
            )
            assert {op: calls for (op, _), calls in sent(part).items()} == real, name
