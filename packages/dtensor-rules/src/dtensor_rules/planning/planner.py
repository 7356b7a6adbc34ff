"""Makes the plan of a call: from the first rule that answers, or from torch's propagation."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.utils import _pytree as pytree

from dtensor_rules.inspect import logs
from dtensor_rules.plan import Move, Output, Plan
from dtensor_rules.planning import budget
from dtensor_rules.redistribution import transform_between
from dtensor_rules.registry import table
from dtensor_rules.registry.call import Call
from dtensor_rules.registry.pattern import is_in_place
from dtensor_rules.registry.validation import compare_first_results


def plan(op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Plan:
    """Makes the plan of a call; C++ calls it once per key.

    Args:
        op: the operator.
        args: its positional arguments, DTensors among them.
        kwargs: its keyword-only arguments that are no defaults.

    Returns:
        a plan; one with a reason where torch has to do the call, its errors included.
    """
    start = time.thread_time()  # on a machine with other work all takes longer
    made = _plan(op, args, kwargs)
    seconds = time.thread_time() - start
    budget.check(str(op), seconds, lambda: _describe(op, args, kwargs))
    rule = table.name_of(made)
    if logs.wants_misses():
        logs.miss(op, args, kwargs, made, rule=rule, seconds=seconds)
    if rule is None:
        return made
    return compare_first_results(rule, Call(op, args, kwargs), made)


def _describe(
    op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    return f"{logs.call(op, args, kwargs)} on {tensors[0].device_mesh}"


def _plan(op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Plan:
    dispatcher = DTensor._op_dispatcher
    if op in dispatcher._custom_op_handlers:
        return Plan(reason="handler")
    if op in dispatcher._random_ops:
        return Plan(reason="random")
    call = Call(op, args, kwargs)
    try:
        schema: Any = call.info.schema
    except Exception:
        return _torch_says_why()
    if (made := table.match(call)) is not None:
        return made
    try:
        sharding = dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    except Exception as error:
        _refuse_mixed_meshes(call, cause=error)
        return _torch_says_why()
    return from_sharding(call, sharding)


def _torch_says_why() -> Plan:
    """Returns a plan with which torch executes the call, and raises its own error."""
    return Plan(reason="propagation", cacheable=False)


def _refuse_mixed_meshes(call: Call, cause: Exception | None = None) -> None:
    """Says which argument is on another mesh than the first; torch says which meshes they are."""
    arguments = call.op._schema.arguments
    positional = zip(call.places, call.specs, strict=False)  # no specs of keyword arguments
    placed = [(arguments[at].name, spec.mesh) for (at, _), spec in positional]
    for name, mesh in placed:
        first, expected = placed[0]
        if mesh != expected:
            raise RuntimeError(
                f"{call.op}: argument {name!r} is on {mesh}, argument {first!r} on {expected}: "
                f"bring them to one mesh first"
            ) from cause


def from_sharding(call: Call, sharding: OutputSharding) -> Plan:
    """Makes the plan of torch's sharding decision.

    Args:
        call: the call.
        sharding: what `ShardingPropagator.propagate_op_sharding_non_cached` decided about it.
    """
    op = call.op
    moves: list[Move] = []
    values: dict[int, object] = {}
    instead = None
    if sharding.needs_redistribute:
        wanted = sharding.redistribute_schema
        assert wanted is not None
        moves = _moves(call, wanted)
        if sharding.use_val_from_redistribute_schema:
            if call.info.args_tree_spec is not None:
                return Plan(reason="unsupported")  # no operator of torch's does both
            values = _values(wanted)
        if wanted.op != op:
            instead = wanted.op
    spec: Any = sharding.output_spec
    outs = [index for index, argument in enumerate(op._schema.arguments) if argument.is_out]
    if outs:
        specs = spec if isinstance(spec, (tuple, list)) else (spec,)
        if len(specs) != len(outs) or not all(isinstance(spec, DTensorSpec) for spec in specs):
            return Plan(reason="unsupported")
        given: dict[int, DTensorSpec] = dict(zip(outs, specs, strict=True))
        return Plan(moves=moves, values=values, instead=instead, given=given)
    if is_in_place(op):
        # squeeze_ and its like change what self is: torch does them.
        if isinstance(spec, DTensorSpec) and spec.placements != call.specs[0].placements:
            return Plan(reason="unsupported")
        return Plan(moves=moves, values=values, instead=instead)
    if op == torch.ops.aten.equal.default:
        return Plan(reason="unsupported")  # torch adds an all-reduce, and so does the rule for it
    return Plan(moves=moves, values=values, instead=instead, outputs=_outputs(op, spec))


def _moves(call: Call, wanted: OpSchema) -> list[Move]:
    """Returns the redistributions of positional arguments; torch has none of keyword arguments."""
    info = call.info
    # Torch flattens the arguments of operators that take lists of tensors, and its wish with them.
    nested = info.args_tree_spec is not None
    wishes = pytree.tree_leaves(wanted.args_schema) if nested else wanted.args_schema
    places = _places(call.args) if nested else [(index, -1) for index in range(len(call.args))]
    moves = []
    for (argument, element), source, target in zip(
        places, info.flat_args_schema, wishes, strict=False
    ):
        if isinstance(source, DTensorSpec) and source != target:
            assert isinstance(target, DTensorSpec)
            if source.mesh != target.mesh:  # some versions of torch notice when it is to be moved
                _refuse_mixed_meshes(call)
            moves.append(Move(argument, element, transform_between(source, target), target))
    return moves


def _places(args: tuple[object, ...]) -> list[tuple[int, int]]:
    """Yields the position and element of every leaf of the arguments; element -1 for no list."""
    return [
        (index, element)
        for index, value in enumerate(args)
        for element in (range(len(value)) if isinstance(value, (list, tuple)) else (-1,))
    ]


def _values(wanted: OpSchema) -> dict[int, object]:
    """Returns the arguments without tensors, which torch rewrites from global to local sizes."""
    return {
        index: value
        for index, value in enumerate(wanted.args_schema)
        if not any(isinstance(leaf, DTensorSpec) for leaf in pytree.tree_leaves(value))
    }


def _outputs(op: torch._ops.OpOverload, spec: object) -> list[Output]:
    """Returns the output of each result in the operator's schema."""
    returns = op._schema.returns
    if spec is None:
        return [None] * len(returns)
    if len(returns) == 1:
        return [list(spec) if isinstance(spec, (tuple, list)) else spec]  # type: ignore[list-item]
    if isinstance(spec, DTensorSpec):
        return [spec] * len(returns)
    assert isinstance(spec, (tuple, list))
    assert len(spec) == len(returns)
    return list(spec)
