"""Masks of attention: their pairs, by definition, intersections, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask
from transformers.masking_utils import find_packed_sequence_indices

from plan_api import AttentionMask
from plan_api.context_parallel.mask import key_ranges

lengths = st.integers(1, 12)


@given(data=st.data(), length=lengths)
def test_pairs_are_those_of_the_definition(data, length, masks, pairs):
    mask = data.draw(masks(length, 2))
    expected = pairs(mask, length)
    assert torch.equal(mask.dense(length)[:, 0], expected)
    assert mask.area(length) == expected.sum()


@given(data=st.data(), length=lengths)
def test_ranges_do_not_go_back(data, length, masks):
    """Tiles are found by bisection."""
    mask = data.draw(masks(length, 2))
    for row in range(mask.rows):
        ranges = key_ranges(mask.row(row), length)
        for bound in (ranges.start, ranges.stop):
            assert list(bound) == sorted(bound)


@given(data=st.data(), length=lengths)
def test_an_intersection_has_the_pairs_of_both(data, length, masks):
    one, other = data.draw(masks(length, 2)), data.draw(masks(length, 2))
    both = (one & other).dense(length)
    assert torch.equal(both, (one.dense(length) & other.dense(length)).expand_as(both))


@settings(max_examples=20, deadline=None)
@given(data=st.data(), length=lengths, block_size=st.sampled_from([2, 4]))
def test_flex_attention_has_the_same_pairs(data, length, block_size, masks):
    """By its function, and by the blocks that it computes: no other has a pair."""
    mask = data.draw(masks(length, 2))
    expected = mask.dense(length)
    found = mask.block_mask(length, torch.device("cpu"), block_size=block_size)
    pairs = create_mask(found.mask_mod, mask.rows, 1, length, length, device="cpu")
    assert torch.equal(pairs, expected)
    padded = F.pad(expected, (0, -length % block_size, 0, -length % block_size))
    blocks = padded.unflatten(3, (-1, block_size)).unflatten(2, (-1, block_size))
    assert torch.equal(found.to_dense().bool(), blocks.any(5).any(3))
    assert torch.equal(found.full_kv_num_blocks, blocks.all(5).all(3).sum(-1))
    assert torch.equal(found.kv_num_blocks + found.full_kv_num_blocks, found.to_dense().sum(-1))


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_documents_are_the_same_by_lengths_edges_ids_and_positions(lengths):
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(one) for one in lengths])[None]
    expected = AttentionMask.of_lengths(lengths)
    edges = torch.tensor([0, *lengths]).cumsum(0)
    assert AttentionMask.of_cumulative_lengths(edges) == expected
    assert AttentionMask.of_document_ids(ids + 3) == expected
    packed = find_packed_sequence_indices(positions)
    if packed is None:
        assert AttentionMask.of_position_ids(positions) == AttentionMask(causal=True)
    else:
        assert AttentionMask.of_position_ids(positions) == expected
        assert AttentionMask.of_document_ids(packed) == expected


def test_inputs_of_a_model_are_padding_or_else_documents():
    padding = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])
    mask = AttentionMask.of_inputs(padding, positions)
    assert mask == AttentionMask(causal=True, tokens=((1, 4), (0, 2)))
    mask = AttentionMask.of_inputs(None, positions, causal=False)
    assert mask == AttentionMask(documents=((0, 2, 4), (0, 3, 4)))
    assert AttentionMask.of_inputs(torch.ones(2, 4)) == AttentionMask(causal=True)
    with pytest.raises(ValueError, match=r"attention_mask of padding, .*got \(2, 1, 4, 4\)"):
        AttentionMask.of_inputs(torch.ones(2, 1, 4, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionMask(window=0), "window of at least 1 token, got 0"),
        (lambda: AttentionMask.of_lengths([3, 0, 2]), "an empty one, number 1 of row 0, at posi"),
        (lambda: AttentionMask(documents=((0, 4, 2),)), "one at 2 after one at 4 in row 0"),
        (lambda: AttentionMask.of_cumulative_lengths([1, 4]), r"from position 0 .*got \(1, 4\)"),
        (
            lambda: AttentionMask.of_document_ids(torch.tensor([[0, 1, 1], [2, 2, 1]])),
            "ids of documents that do not decrease .*got 1 after 2 at position 2 of row 1",
        ),
        (
            lambda: AttentionMask.of_padding(torch.tensor([[1, 0, 1, 0]])),
            "padding at the ends of row 0 only, got padding between positions 0 and 2",
        ),
        (lambda: AttentionMask(tokens=((3, 2),)), r"from a first position .*got \(3, 2\)"),
        (
            lambda: AttentionMask(documents=((0, 2),) * 3, tokens=((0, 2),) * 2),
            "got 3 and 2 rows",
        ),
        (
            lambda: AttentionMask.of_lengths([2]) & AttentionMask.of_lengths([3]),
            "documents of one sequence, got 2 and 3 tokens",
        ),
        (
            lambda: AttentionMask(tokens=((0, 2),) * 3) & AttentionMask(tokens=((0, 2),) * 2),
            "as many rows, got 3 and 2",
        ),
    ],
)
def test_what_is_no_mask_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (AttentionMask.of_lengths([3, 4]), "of 6 tokens together.*got 7 in row 0; shorten them"),
        (AttentionMask.of_lengths([3, 2]), "of 6 tokens.*got 5 .*a document of the rest"),
        (AttentionMask(tokens=((0, 4), (2, 7))), "tokens up to 7 in row 1"),
        (AttentionMask(tokens=((0, 4),) * 3), "one row or of 2, .*got 3 rows"),
    ],
)
def test_a_mask_of_another_sequence_is_refused(mask, message):
    with pytest.raises(ValueError, match=f"attn: expected .*{message}"):
        mask.check(6, 2, "attn")


@pytest.mark.parametrize("name", ["area", "block_mask", "dense"])
def test_documents_longer_than_the_sequence_are_refused_by_each_method(name):
    options = {"device": torch.device("cpu")} if name == "block_mask" else {}
    with pytest.raises(ValueError, match=f"{name}: expected documents of 6 tokens together"):
        getattr(AttentionMask.of_lengths([3, 4]), name)(6, **options)
