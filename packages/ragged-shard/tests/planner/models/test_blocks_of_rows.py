"""Which matrices have blocks of rows."""

import pytest

from ragged_shard.planner.models.shapes import (
    ModelShapes,
    ParameterGroup,
    ParameterShape,
    resolve_target,
    specs_of,
)
from ragged_shard.planner.spec import TensorSpec

EXPERT = ParameterShape("mlp.experts.w", (6, 10, 4), "expert")
QUERY = ParameterShape("self_attn.q_proj.weight", (12, 8))
BIAS = ParameterShape("mlp.experts.w_bias", (6, 10), "other")
LAYER = ParameterGroup("layers.0", (QUERY, EXPERT, BIAS))
SPARSE = ModelShapes(
    "sparse", (LAYER, ParameterGroup("root", (ParameterShape("norm.weight", (8,), "other"),)))
)
DENSE = ModelShapes("dense", (ParameterGroup("layers.0", (QUERY, BIAS)),))


def blocks(rows, target):
    return {spec.name: spec.block for spec in specs_of(LAYER, rows, target)}


@pytest.mark.parametrize(
    ("target", "query", "expert"),
    [
        ("experts", 1, 3 * 4),
        ("all", 3 * 8, 3 * 4),
        ("q_proj", 3 * 8, 1),
        (r"^layers\.0\.mlp", 1, 3 * 4),
    ],
)
def test_a_block_is_whole_rows_of_the_last_dim_where_the_target_says(target, query, expert):
    assert blocks(3, target) == {QUERY.name: query, EXPERT.name: expert, BIAS.name: 1}


def test_a_block_is_no_larger_than_its_tensor():
    assert blocks(1000, "all") == {QUERY.name: 12 * 8, EXPERT.name: 6 * 10 * 4, BIAS.name: 1}


def test_specs_keep_names_sizes_shapes_and_order():
    assert specs_of(LAYER, 2, "experts") == (
        TensorSpec(QUERY.name, 96, 1, (12, 8)),
        TensorSpec(EXPERT.name, 240, 8, (6, 10, 4)),
        TensorSpec(BIAS.name, 60, 1, (6, 10)),
    )


@pytest.mark.parametrize(("model", "target"), [(SPARSE, "experts"), (DENSE, "all")])
def test_by_default_experts_have_blocks_and_without_experts_all_matrices(model, target):
    assert resolve_target(model, None) == target


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        (DENSE, "experts", "dense: no matrix matches 'experts'; pass 'all', or a regular"),
        (SPARSE, "k_proj", "sparse: no matrix matches 'k_proj'"),
        (SPARSE, "norm", "sparse: no matrix matches 'norm'"),  # a vector only
        (SPARSE, "q_proj(", r"expected a regular expression, got 'q_proj\(': missing \)"),
    ],
)
def test_a_target_that_matches_no_matrix_is_refused(model, target, message):
    with pytest.raises(ValueError, match=message):
        resolve_target(model, target)
