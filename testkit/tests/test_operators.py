import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from testkit import fake_mesh
from testkit.operators import OPERATORS, operator_cases

CASES = operator_cases((4,))


def test_a_name_stands_for_one_operator():
    assert len({operator.name for operator in OPERATORS}) == len(OPERATORS)


def test_a_case_has_an_id_of_its_own_that_can_be_read():
    assert len({str(case) for case in CASES}) == len(CASES)
    assert "where-mesh4-S0,S0,S0-i64" in {str(case) for case in CASES}
    assert "mul scalar-mesh2x2-S0.S1-f32" in map(str, operator_cases((2, 2), ["mul scalar"]))


def test_operands_come_alike_with_the_first_replicated_and_with_the_first_otherwise():
    names = [str(case).split("-")[2] for case in operator_cases((4,), ["lerp"])]
    assert names[:11] == [
        "R,R", "R,Psum", "S0,S0", "R,S0", "S0,R", "S1,S1", "R,S1", "S1,S0", "Psum,Psum",
        "Psum,S1", "S0,S0",
    ]  # fmt: skip


# The fused optimizers write without telling the version counters of plain tensors.
VERSIONED = [operator for operator in OPERATORS if not operator.name.startswith("_fused")]


@pytest.mark.parametrize("operator", VERSIONED, ids=lambda operator: operator.name)
def test_an_operator_runs_on_plain_tensors_and_writes_to_what_it_says(operator):
    case = next(case for case in CASES if case.operator is operator)
    tensors = []
    for seed, (operand, row) in enumerate(zip(operator.operands, case.operands, strict=True)):
        tensor = row.tensor(seed)
        tensors.append(tensor.abs() % operand.below if operand.below else tensor)
    operator.run(*tensors)
    written = [index for index, tensor in enumerate(tensors) if tensor._version > 0]
    assert written == list(range(operator.mutates))


def test_inputs_are_equal_in_every_call_and_within_their_bounds():
    case = operator_cases((4,), ["embedding"])[0]
    with fake_mesh((4,)) as mesh:
        (rows, table), (again, _) = case.inputs(mesh), case.inputs(mesh)
    assert isinstance(rows, DTensor)
    assert torch.equal(rows.to_local(), again.to_local())
    assert 0 <= rows.to_local().min() <= rows.to_local().max() < table.shape[0]


def test_indices_and_masks_are_never_partial():
    for case in operator_cases((4,), ["gather", "where"]):
        for row in case.operands:
            assert row.dtype.is_floating_point or not row.partial or row.dtype is case.dtype


def test_only_floating_operands_that_have_a_gradient_are_differentiable():
    embedding, foreach, integer = (
        operator_cases((4,), [name])[-1] for name in ("embedding", "_foreach_add_", "add")
    )
    assert embedding.differentiable() == [False, True]
    assert foreach.differentiable() == [False] * 4
    assert integer.dtype is torch.int64
    assert integer.differentiable() == [False, False]
    assert integer.operands[0].placements == (Shard(0),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 2, 2),), r"1 or 2 axes, got \(2, 2, 2\)"),
        (((4,), ["nothing"]), "only= of the table, got .'nothing'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        operator_cases(*arguments)
