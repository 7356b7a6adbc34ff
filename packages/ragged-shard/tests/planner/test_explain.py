"""explain: it names the tensor, the block, the place, and what another block would cost."""

import random
import re
from dataclasses import replace

import pytest

from ragged_shard.planner import TensorSpec, plan_layout


def lines(specs, world_size, **options):
    return plan_layout(specs, world_size, **options).explain().splitlines()


def test_no_padding_needs_no_reason():
    assert lines([TensorSpec("a", 12)], 4) == [
        "1 tensor with 12 elements in 4 shards of 3; padding: 0 elements, 0.00 % of the tensors.",
        "No shard can be smaller: the tensors alone need as much.",
    ]


def test_a_tensor_over_many_shards_is_named_with_its_block_and_what_it_costs():
    text = lines([TensorSpec("norm", 3), TensorSpec("experts", 120, 7), TensorSpec("bias", 5)], 8)
    assert text == [
        "3 tensors with 128 elements in 8 shards of 21; padding: 40 elements, 31.25 % of the "
        "tensors.",
        "That is 31.25 % above 16, the tensors' elements over the number of shards.",
        "No order of the tensors allows a smaller shard.",
        "'experts' is spread over 7 shards, so the shard must be a multiple of its block: 3 x 7.",
        "The block of 7 costs most: were it 1, for 'experts', the shard would have 16 elements, "
        "0.00 % padding.",
        "4 elements of padding in 1 gap before tensors, 36 after the last one.",
        "'experts' (120 elements in blocks of 7) has 4 elements of padding before it: shard 1 then "
        "starts between two of its blocks.",
    ]


def test_other_orders_and_tensors_of_the_same_block_are_mentioned():
    assert lines([TensorSpec(f"w{i}", size, size) for i, size in enumerate((6, 9, 6, 9))], 3) == [
        "4 tensors with 30 elements in 3 shards of 15; padding: 15 elements, 50.00 % of the "
        "tensors.",
        "That is 50.00 % above 10, the tensors' elements over the number of shards.",
        "No smaller shard is possible in this order of the tensors; another order might need "
        "less, but none less than 10.",
        "The block of 9 costs most: were it 1, for 'w1' and 1 more tensor, the shard would have 11 "
        "elements, 10.00 % padding.",
        "All of the padding is after the last tensor.",
    ]


def test_an_owner_that_is_full_is_the_reason_of_a_gap():
    text = lines([TensorSpec("a", 10, 10), TensorSpec("b", 9, 9), TensorSpec("c", 9, 9)], 3)
    assert text[-2:] == [
        "1 element of padding in 1 gap before tensors, 1 after the last one.",
        "'c' (9 elements in blocks of 9) has 1 element of padding before it: it cannot start in "
        "what is left of shard 1.",
    ]


def test_what_a_relaxed_block_would_give_is_what_planning_gives():
    specs = [TensorSpec("a", 50, 7), TensorSpec("b", 61, 11), TensorSpec("c", 30, 13)]
    text = "\n".join(lines(specs, 5))
    block, shard = re.search(r"block of (\d+) costs most.* have (\d+) elements", text).groups()
    relaxed = {
        spec.block: plan_layout(
            [replace(other, block=1) if other is spec else other for other in specs], 5
        ).shard_size
        for spec in specs
    }
    assert relaxed[int(block)] == int(shard) == min(relaxed.values())


def test_blocks_that_force_it_only_together_are_text_to():
    text = lines([TensorSpec("a", 100, 6), TensorSpec("b", 100, 4)], 19)
    assert "in 19 shards of 12" in text[0]
    assert "No single block size forces this: with any one of them at 1, others need as much." in (
        text
    )


def test_the_alignment_is_named_where_it_costs_most():
    text = lines([TensorSpec("a", 10), TensorSpec("b", 7, 2)], 2, alignment=16)
    assert "The alignment costs most: without it the shard would have 9 elements, 5.88 %" in (
        "\n".join(text)
    )


def test_an_aligned_start_is_the_reason_of_a_gap():
    text = lines([TensorSpec("a", 3), TensorSpec("b", 3)], 1, alignment=4, align_starts=True)
    assert text[-1] == (
        "'b' (3 elements in blocks of 1) has 1 element of padding before it: its start is aligned "
        "to 4."
    )


def test_a_search_that_gave_up_says_between_what():
    draw = random.Random(26)
    specs = [
        TensorSpec(f"t{i}", draw.randint(10**6, 3 * 10**7), draw.randint(1, 50)) for i in range(18)
    ]
    layout = plan_layout(specs, 24, node_limit=5)
    assert (
        "The search gave up at its node limit: the smallest shard for this order is between "
        f"{layout.proved_lower_bound:,} and {layout.shard_size:,}."
    ) in layout.explain()


@pytest.mark.parametrize("order", ["given", "block", "shape", "best"])
def test_gaps_are_named_largest_first_and_at_most_three(order):
    specs = [TensorSpec(f"t{i}", 40 + 7 * i, 5 + i) for i in range(12)]
    padding = [
        int(found.group(1))
        for line in lines(specs, 9, order=order)
        if (found := re.search(r"has (\d+) elements? of padding before it", line))
    ]
    assert len(padding) == 3
    assert padding == sorted(padding, reverse=True)
