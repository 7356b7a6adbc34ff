"""The picture of padding: what each of its two lines counts."""

from integration.gallery.pictures.padding import padding, padding_by_tensor
from ragged_shard.planner import TensorSpec


def test_each_tensor_by_itself_has_equal_shards_of_complete_blocks():
    three_blocks = TensorSpec("a", 10, 4)  # the last block has 2 elements
    assert padding_by_tensor([three_blocks], 2) == 2 * 2 * 4 - 10
    assert padding_by_tensor([TensorSpec("b", 16, 4)], 4) == 0


def test_planning_pads_less_where_tensors_have_fewer_blocks_than_ranks():
    found = padding("deepseek-v3", 64, rows=128)
    assert found.planned < 0.001
    assert found.by_tensor > 1.0
