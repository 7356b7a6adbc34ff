"""The patch point in sharding propagation: rules for one mesh axis, combined with torch's.

There are three layers, outermost first: ragged axes, interleaved axes, native. A layer replaces its
placements in the inputs, lets the next layer decide the other axes, and sets its own decision in
the result. The inputs of an operator without a rule are gathered (fallback.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _pytree as pytree

from ragged_shard import _compat
from ragged_shard.dispatch.operator_call import AxisDecision, AxisPlacement, AxisRule, OperatorCall
from ragged_shard.dispatch.rules import interleaved, table
from ragged_shard.fallback import GatheredSpec
from ragged_shard.geometry.specs import (
    Placements,
    any_custom,
    dim_of,
    is_custom,
    replace_axis,
    with_placements,
)
from ragged_shard.geometry.validation import check_local
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard
from ragged_shard.random_regions import INITIALIZERS, LIKE, random_refused, warn_of_own_numbers
from ragged_shard.redistribution.reduction_input import ReductionInput


def propagate_op_sharding(
    native: Callable[..., OutputSharding], propagator: object, op_schema: OpSchema
) -> OutputSharding:
    """Replaces `ShardingPropagator.propagate_op_sharding_non_cached`, with this package's rules.

    Args:
        native: torch's method.
        propagator: the method's self.
        op_schema: the operator and the specs of its inputs.

    Raises:
        RuntimeError: the operator is random and fills no tensor, or in-place without a rule, or a
            keyword tensor would have to be redistributed.
    """
    call = OperatorCall(op_schema)

    def propagate_native(schema: OpSchema) -> OutputSharding:
        return native(propagator, schema)

    def propagate_interleaved(schema: OpSchema) -> OutputSharding:
        layer = _Layer(InterleavedShard, interleaved.rule_for, propagate_native, propagator)
        return layer.propagate(OperatorCall(schema))

    if not any(any_custom(spec.placements) for spec in call.specs):
        return native(propagator, op_schema)
    return _Layer(RaggedShard, table.rule_for, propagate_interleaved, propagator).propagate(call)


def unwrap_to_op_info(
    native: Callable[..., Any],
    dispatcher: object,
    op_call: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Any:
    """Replaces `OpDispatcher.unwrap_to_op_info`, and checks local tensors of ragged operands.

    A DTensor that was constructed directly is checked at its first operator. Torch calls this for
    operators whose decision is not cached, torch 2.11 also for each operator on lists, so the
    check of an operand must be cheap. Nothing is checked while torch traces.

    Raises:
        ValueError: a local tensor has not the shape of the placement, for example a flat one.
    """
    if not _compat.is_tracing():
        for argument in (*args, *kwargs.values()):
            for leaf in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(leaf, DTensor):
                    check_local(op_call, leaf._local_tensor, leaf._spec)
    return native(dispatcher, op_call, args, kwargs)


@dataclass(frozen=True)
class _Layer:
    """Decides the axes with placements of one kind; the inner layer decides the others.

    Attributes:
        kind: the class of the placements.
        rule_for: returns the rule of an operator.
        inner: the next layer, or native.
        propagator: torch's, which infers the shapes of results.
    """

    kind: type
    rule_for: Callable[[OperatorCall], AxisRule | None]
    inner: Callable[[OpSchema], OutputSharding]
    propagator: Any

    def propagate(self, call: OperatorCall) -> OutputSharding:
        """Decides an operator call."""
        if not any(isinstance(p, self.kind) for spec in call.specs for p in spec.placements):
            return self.inner(call.schema)
        _check_random(call)
        rule = self.rule_for(call)
        decision = None if rule is None else rule(call)
        combined = None if decision is None else self._combined(call, decision)
        return combined or self._gathered(call)

    def _combined(self, call: OperatorCall, decision: AxisDecision) -> OutputSharding | None:
        """Combines the inner decision with the rule's; None where they do not fit."""
        inner_specs = [
            _without_axis(spec, self.kind, on_axis, as_shard=decision.as_shard)
            for spec, on_axis in zip(call.specs, decision.inputs, strict=True)
        ]
        result = self._inner_decision(_with_specs(call.schema, inner_specs), decision)
        if result is None:
            return None
        schema = result.redistribute_schema
        required_specs = inner_specs if schema is None else _specs_of(schema, call)
        inputs: list[DTensorSpec] = []
        for before, inner, required, on_axis in zip(
            call.specs, inner_specs, required_specs, decision.inputs, strict=True
        ):
            placements: Placements = tuple(required.placements)
            if on_axis is not None:
                moved = placements[on_axis.axis] != inner.placements[on_axis.axis]
                if moved and not _is_shard(on_axis):
                    return None  # torch would redistribute this axis, so the inputs are gathered
                if not moved:
                    placements = replace_axis(placements, on_axis.axis, on_axis.placement)
                others = replace_axis(before.placements, on_axis.axis, Replicate())
                if any(isinstance(placement, self.kind) for placement in others):
                    # A rule decides one axis; a second axis of this kind is gathered.
                    inputs.append(GatheredSpec.of(before, placements, call.name))
                    continue
            inputs.append(with_placements(before, placements))
        outputs = _outputs(result, decision)
        if not _keep_bases(call.specs, [*inputs, *pytree.tree_leaves(outputs)]):
            return None
        arguments = {
            index: value(_first(outputs)) if callable(value) else value
            for index, value in decision.arguments.items()
        }
        return _output_sharding(call, result, inputs, outputs, arguments)

    def _inner_decision(self, schema: OpSchema, decision: AxisDecision) -> OutputSharding | None:
        try:
            return self.inner(schema)
        except NotImplementedError:
            if not decision.elementwise:
                raise
        return _elementwise(schema, self.propagator)

    def _gathered(self, call: OperatorCall) -> OutputSharding:
        """Decides without a rule, with Replicate in place of this kind of placement."""
        _refuse_in_place(call, self.kind)
        inner_specs = [_without_axis(spec, self.kind) for spec in call.specs]
        result = self.inner(_with_specs(call.schema, inner_specs))
        schema = result.redistribute_schema
        required_specs = inner_specs if schema is None else _specs_of(schema, call)
        inputs: list[DTensorSpec] = []
        for before, required in zip(call.specs, required_specs, strict=True):
            placements = tuple(required.placements)
            if any(isinstance(p, self.kind) for p in before.placements):
                inputs.append(GatheredSpec.of(before, placements, call.name))
            else:
                inputs.append(with_placements(before, placements))
        return _output_sharding(call, result, inputs, result.output_spec, {})


def _keep_bases(before: Sequence[DTensorSpec], after: Sequence[DTensorSpec | None]) -> bool:
    """Whether ragged units that are those of the longest base remain units of the same bases."""
    known = {_shards_of_dim_0(spec.placements) for spec in before if _bases_differ(spec)}
    return not known or all(
        _shards_of_dim_0(spec.placements) in known
        for spec in after
        if spec is not None and _bases_differ(spec)
    )


def _bases_differ(spec: DTensorSpec) -> bool:
    placements = (p.ragged if isinstance(p, ReductionInput) else p for p in spec.placements)
    return any(isinstance(p, RaggedShard) and p.bases_differ for p in placements)


def _shards_of_dim_0(placements: Sequence[Placement]) -> tuple[Placement | None, ...]:
    return tuple(placement if dim_of(placement) == 0 else None for placement in placements)


def _is_shard(on_axis: AxisPlacement) -> bool:
    """Whether a decision's placement has a Shard's local tensors, so that torch may move it."""
    placement = on_axis.placement
    return isinstance(placement, InterleavedShard) and placement.equals_shard


def _elementwise(schema: OpSchema, propagator: Any) -> OutputSharding | None:
    """Decides an elementwise operator for which torch has no strategy.

    Returns None if operands of one shape are placed differently, or if an operand is Partial.
    """
    call = OperatorCall(schema)
    [lead, *others] = call.operands
    if any(p.is_partial() for spec in call.specs for p in spec.placements):
        return None
    for operand in others:
        leading = lead if operand.item is None else call.lead_of(operand)
        if operand.spec.placements != leading.spec.placements and operand.shape.numel() > 1:
            return None
    metas = propagator._propagate_tensor_meta(schema)
    if metas is None or len(call.op._schema.returns) == 0:
        return OutputSharding(output_spec=None)
    if isinstance(metas, TensorMeta):
        return OutputSharding(with_placements(lead.spec, tuple(lead.spec.placements), metas))
    leads = [operand for operand in call.operands if operand.argument == lead.argument]
    specs = [
        with_placements(operand.spec, tuple(operand.spec.placements), meta)
        for operand, meta in zip(leads, metas, strict=True)
    ]
    return OutputSharding(type(metas)(specs))


def _without_axis(
    spec: DTensorSpec, kind: type, on_axis: AxisPlacement | None = None, *, as_shard: bool = False
) -> DTensorSpec:
    """Returns the spec for the inner layer, without this kind of placement on any axis."""
    placements: Placements = tuple(
        Replicate() if isinstance(placement, kind) else placement for placement in spec.placements
    )
    if on_axis is not None:
        substitute: Placement = Replicate()
        if as_shard and isinstance(on_axis.placement, InterleavedShard):
            substitute = Shard(on_axis.placement.dim)
        placements = replace_axis(placements, on_axis.axis, substitute)
    return spec if placements == spec.placements else with_placements(spec, placements)


def _outputs(result: OutputSharding, decision: AxisDecision) -> object:
    specs: object = result.output_spec
    if isinstance(specs, DTensorSpec):
        return _placed(specs, decision.outputs[0], decision)
    if not isinstance(specs, list | tuple):
        return None
    outputs = decision.outputs if len(decision.outputs) > 1 else decision.outputs * len(specs)
    placed = [
        None if spec is None else _placed(spec, on_axis, decision)
        for spec, on_axis in zip(specs, outputs, strict=True)
    ]
    return type(specs)(placed)


def _placed(
    spec: DTensorSpec, on_axis: AxisPlacement | None, decision: AxisDecision
) -> DTensorSpec:
    if on_axis is None:
        return spec
    placement, native = on_axis.placement, spec.placements[on_axis.axis]
    if decision.as_shard:
        assert isinstance(placement, InterleavedShard)
        before, placement = placement, native
        if isinstance(
            native, _StridedShard
        ):  # an inner flattened dim; torch 2.12+ returns no Shard
            interleaves = before.interleaves * int(native.split_factor)
            placement = before.with_dim(native.dim, interleaves)
        elif isinstance(native, Shard):
            placement = before.with_dim(native.dim)
    return with_placements(spec, replace_axis(spec.placements, on_axis.axis, placement))


def _output_sharding(
    call: OperatorCall,
    result: OutputSharding,
    inputs: list[DTensorSpec],
    outputs: object,
    arguments: dict[int, object],
) -> OutputSharding:
    moved = any(
        before.placements != after.placements
        for before, after in zip(call.specs, inputs, strict=True)
    )
    _refuse_moved_keywords(call, inputs)
    if call.in_place and isinstance(call.args[0], DTensorSpec) and moved:
        [first, *_] = inputs
        if first.placements != call.args[0].placements:
            raise RuntimeError(
                f"{call.name}: expected its first argument, to which it writes, with placements "
                f"{first.placements}, got {call.args[0].placements}; redistribute it first"
            )
    rewritten = result.use_val_from_redistribute_schema or bool(arguments)
    if not moved and not rewritten:
        return OutputSharding(output_spec=outputs)
    base = result.redistribute_schema or call.schema
    schema = _with_specs(base, inputs, keywords=call.schema.kwargs_schema)
    if arguments:
        args = tuple(arguments.get(i, arg) for i, arg in enumerate(schema.args_schema))
        schema = OpSchema(schema.op, args, schema.kwargs_schema)
    return OutputSharding(
        output_spec=outputs,
        redistribute_schema=schema,
        needs_redistribute=True,
        use_val_from_redistribute_schema=rewritten,
    )


def _with_specs(
    schema: OpSchema, specs: list[DTensorSpec], keywords: dict[str, object] | None = None
) -> OpSchema:
    """Returns the schema with other specs for its tensors, in order."""
    remaining = iter(specs)
    args, kwargs = pytree.tree_map(
        lambda leaf: next(remaining) if isinstance(leaf, DTensorSpec) else leaf,
        (schema.args_schema, schema.kwargs_schema if keywords is None else keywords),
    )
    return OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)


def _specs_of(schema: OpSchema, call: OperatorCall) -> list[DTensorSpec]:
    """Returns the specs that torch requires, whose schema may omit keyword tensors."""
    specs = list(OperatorCall(schema).specs)
    return specs + list(call.specs[len(specs) :])


def _first(outputs: object) -> DTensorSpec:
    first = outputs if isinstance(outputs, DTensorSpec) else pytree.tree_leaves(outputs)[0]
    assert isinstance(first, DTensorSpec)
    return first


def _draws(call: OperatorCall) -> bool:
    """Whether the call draws random numbers; attention is tagged so, also without dropout."""
    if torch.Tag.nondeterministic_seeded not in call.op.tags:
        return False
    has_dropout = any(p.name == "dropout_p" for p in call.op._schema.arguments)
    return not has_dropout or call.argument("dropout_p", default=0.0) != 0.0


def _check_random(call: OperatorCall) -> None:
    """Warns of an operator that fills a tensor with random numbers; refuses other random ones."""
    if not _draws(call):
        return
    if call.op._schema.name.removeprefix("aten::") in INITIALIZERS | LIKE:
        warn_of_own_numbers(call.name)
    else:
        placements = [s.placements for s in call.specs if any(map(is_custom, s.placements))]
        raise random_refused(call.name, placements[0])


def _refuse_in_place(call: OperatorCall, kind: type) -> None:
    if not call.in_place or not isinstance(call.args[0], DTensorSpec):
        return
    placements = call.args[0].placements
    if any(isinstance(placement, kind) for placement in placements):
        raise RuntimeError(
            f"{call.name}: no rule for this in-place operator with {placements}; "
            f"redistribute to Replicate first, or use the out-of-place operator"
        )


def _refuse_moved_keywords(call: OperatorCall, inputs: list[DTensorSpec]) -> None:
    for operand, after in zip(call.operands, inputs, strict=True):
        if isinstance(operand.argument, str) and operand.spec.placements != after.placements:
            raise RuntimeError(
                f"{call.name}: expected {operand.argument}= with placements {after.placements}, "
                f"got {operand.spec.placements}; torch does not redistribute keyword arguments, "
                f"so redistribute it first"
            )
