"""What a rule's plan has to fulfil: before C++ runs it, which trusts its numbers, and after.

Note: the first run of a plan shows whether the local results are those of its specs; later runs
have the same shapes, and are not compared.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dtensor_rules.plan import Output, Plan
from dtensor_rules.registry.call import Call, check_axes
from dtensor_rules.registry.pattern import is_in_place


def check_plan(rule: str, call: Call, plan: Plan) -> None:
    """Refuses a plan that does not fit its operator.

    Args:
        rule: the name of the rule that made it.
        call: what it was made for.
        plan: its answer.

    Raises:
        ValueError: naming the rule, the operator and the field: moves of what is no DTensor or out
            of order, values of no argument, another number or kind of results than the operator
            has, placements that do not fit mesh and shape.
    """
    if plan.reason is not None:
        return
    where = f"Rule {rule!r}: {call.op}"
    _check_moves(where, call, plan)
    called = plan.instead or call.op
    for index in plan.values:
        if not 0 <= index < len(called._schema.arguments):
            raise ValueError(
                f"{where}: values has {index}; {called} has {len(called._schema.arguments)} "
                f"arguments, counted from 0"
            )
    _check_results(where, call, plan)


def compare_first_results(rule: str, call: Call, plan: Plan) -> Plan:
    """A plan whose first run compares its local results with its specs.

    Args:
        rule: the name of the rule that made it.
        call: what it was made for.
        plan: its answer, which `check_plan` accepts.

    Returns:
        the plan with functions for its specs. They raise a ValueError that names rule, operator and
        result where the local shape or dtype is not the spec's.
    """

    def compared(index: int, spec: Output) -> Output:
        if not isinstance(spec, DTensorSpec):
            return spec

        def spec_of(local: torch.Tensor) -> DTensorSpec:
            if difference := local_difference(spec, local):
                raise ValueError(
                    f"Rule {rule!r}: {call.op}: output {index}: {difference}; return the spec "
                    f"of what the operator computes"
                )
            return spec

        return spec_of

    return replace(plan, outputs=[compared(*each) for each in enumerate(plan.outputs)])


def local_difference(spec: DTensorSpec, local: torch.Tensor) -> str | None:
    """Describes how a local tensor differs from its spec; None if it does not.

    Args:
        spec: with its `tensor_meta`.
        local: this rank's.
    """
    assert spec.tensor_meta is not None
    if local.dtype != spec.tensor_meta.dtype:
        return f"its local tensor is {local.dtype}, its spec says {spec.tensor_meta.dtype}"
    if not all(type(placement) in (Replicate, Shard, Partial) for placement in spec.placements):
        return None  # only the placement itself knows what it holds
    shape, _ = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    if tuple(local.shape) != tuple(shape):
        return (
            f"its local tensor has shape {tuple(local.shape)}; global shape {tuple(spec.shape)} "
            f"with {spec.placements} is {tuple(shape)} on this rank"
        )
    return None


def _check_moves(where: str, call: Call, plan: Plan) -> None:
    places = call.places
    moved = [(move.argument, move.element) for move in plan.moves]
    for place in moved:
        if place not in places:
            raise ValueError(
                f"{where}: moves names (argument, element) {place}, which is no DTensor; "
                f"there are {places}"
            )
    if moved != sorted(set(moved)):
        raise ValueError(f"{where}: moves must be in the order of the arguments, once each")


def _check_results(where: str, call: Call, plan: Plan) -> None:
    called = plan.instead or call.op
    returns = called._schema.returns
    if len(returns) != len(call.op._schema.returns):
        raise ValueError(
            f"{where}: instead={called} has {len(returns)} results, not as many as the call's"
        )
    if plan.given:
        outs = [i for i, argument in enumerate(call.op._schema.arguments) if argument.is_out]
        if sorted(plan.given) != outs:
            raise ValueError(f"{where}: given has {sorted(plan.given)}; the out arguments: {outs}")
        for index, spec in plan.given.items():
            _check_spec(f"{where}: given[{index}]", spec)
        return
    if is_in_place(call.op):
        if plan.outputs:
            raise ValueError(
                f"{where}: {len(plan.outputs)} outputs; an operator that works in place returns "
                f"the tensor that it is given, so it has none"
            )
        return
    if plan.finish is not None:
        if len(returns) != 1:
            raise ValueError(f"{where}: finish makes one result, the operator {len(returns)}")
        return
    if len(plan.outputs) != len(returns):
        raise ValueError(
            f"{where}: {len(plan.outputs)} outputs; the operator has {len(returns)} results"
        )
    for index, (output, result) in enumerate(zip(plan.outputs, returns, strict=True)):
        _check_output(f"{where}: output {index}", output, result.type)


def _check_output(where: str, output: Output, result: torch._C.JitType) -> None:
    if output is None:
        return
    is_list = isinstance(result, torch.ListType)
    if isinstance(output, list) != is_list:
        wanted = "a list of specs" if is_list else "one spec"
        raise ValueError(f"{where} is {output!r}; for {result} it must be {wanted} or None")
    for spec in output if isinstance(output, list) else [output]:
        if isinstance(spec, DTensorSpec):
            _check_spec(where, spec)
        elif spec is not None and not callable(spec):
            raise ValueError(
                f"{where} is {spec!r}; expected a DTensorSpec, as Call.output(placements) makes it"
            )


def _check_spec(where: str, spec: DTensorSpec) -> None:
    if spec.tensor_meta is None:
        raise ValueError(f"{where}: its spec has no tensor_meta")
    check_axes(where, spec)
    for placement in spec.placements:
        if type(placement) is Shard and not 0 <= placement.dim < len(spec.tensor_meta.shape):
            raise ValueError(
                f"{where}: {placement} names no dim of a tensor of {tuple(spec.tensor_meta.shape)}"
            )
