"""The patch point in sharding propagation: rules for one mesh axis, combined with torch's.

The layers, outermost first: ragged axes, interleaved axes, native. Each takes its axis off the
inputs, asks the next layer about the rest, and puts its own decision on. An operator that no rule
knows gets its inputs gathered (fallback.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _pytree as pytree

from ragged_shard.dispatch.operator_call import AxisDecision, AxisPlacement, AxisRule, OperatorCall
from ragged_shard.dispatch.rules import interleaved, table
from ragged_shard.fallback import GatheredSpec
from ragged_shard.geometry.specs import (
    Placements,
    any_custom,
    is_custom,
    replace_axis,
    with_placements,
)
from ragged_shard.geometry.validation import check_local
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard
from ragged_shard.random_regions import random_refused


def propagate_op_sharding(
    native: Callable[..., OutputSharding], propagator: object, op_schema: OpSchema
) -> OutputSharding:
    """`ShardingPropagator.propagate_op_sharding_non_cached`, with the rules of this package.

    Args:
        native: torch's own method.
        propagator: its self.
        op_schema: the operator and the specs of its inputs.

    Raises:
        RuntimeError: a random operator; an in-place operator without a rule; a keyword tensor that
            would have to be redistributed.
    """
    call = OperatorCall(op_schema)

    def ask_native(schema: OpSchema) -> OutputSharding:
        return native(propagator, schema)

    def ask_interleaved(schema: OpSchema) -> OutputSharding:
        layer = _Layer(InterleavedShard, interleaved.rule_for, ask_native, propagator)
        return layer.propagate(OperatorCall(schema))

    if not any(any_custom(spec.placements) for spec in call.specs):
        return native(propagator, op_schema)
    return _Layer(RaggedShard, table.rule_for, ask_interleaved, propagator).propagate(call)


def unwrap_to_op_info(
    native: Callable[..., Any],
    dispatcher: object,
    op_call: torch._ops.OpOverload,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Any:
    """`OpDispatcher.unwrap_to_op_info`, checking the local tensors of ragged operands.

    Torch calls it for an operator whose decision is not in the cache, so the check costs cached
    dispatch nothing: it checks a DTensor that was constructed directly at its first operator.

    Raises:
        ValueError: a local tensor of another shape than this package's, such as a flat one.
    """
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, DTensor):
            check_local(str(op_call), leaf._local_tensor, leaf._spec)
    return native(dispatcher, op_call, args, kwargs)


@dataclass(frozen=True)
class _Layer:
    """Decides the axes with placements of one kind; the inner layer decides the others.

    Attributes:
        kind: class of the placements.
        rule_for: the table of rules.
        inner: the next layer, or native.
        propagator: torch's, for the shapes of results.
    """

    kind: type
    rule_for: Callable[[OperatorCall], AxisRule | None]
    inner: Callable[[OpSchema], OutputSharding]
    propagator: Any

    def propagate(self, call: OperatorCall) -> OutputSharding:
        """The decision about an operator call."""
        if not any(isinstance(p, self.kind) for spec in call.specs for p in spec.placements):
            return self.inner(call.schema)
        _refuse_random(call)
        rule = self.rule_for(call)
        decision = None if rule is None else rule(call)
        joined = None if decision is None else self._joined(call, decision)
        return joined or self._gathered(call)

    def _joined(self, call: OperatorCall, decision: AxisDecision) -> OutputSharding | None:
        """Combines the inner decision with the rule's; None where they do not fit."""
        given = [
            _without_axis(spec, self.kind, on_axis, as_shard=decision.as_shard)
            for spec, on_axis in zip(call.specs, decision.inputs, strict=True)
        ]
        result = self._ask(_with_specs(call.schema, given), decision)
        if result is None:
            return None
        schema = result.redistribute_schema
        wanted = given if schema is None else _specs_of(schema, call)
        inputs: list[DTensorSpec] = []
        for before, asked, want, on_axis in zip(
            call.specs, given, wanted, decision.inputs, strict=True
        ):
            placements: Placements = tuple(want.placements)
            if on_axis is not None:
                moved = placements[on_axis.axis] != asked.placements[on_axis.axis]
                if moved and not _is_shard(on_axis):
                    return None  # torch would redistribute this axis, so the inputs are gathered
                if not moved:
                    placements = replace_axis(placements, on_axis.axis, on_axis.placement)
                others = replace_axis(before.placements, on_axis.axis, Replicate())
                if any(isinstance(placement, self.kind) for placement in others):
                    # A rule decides one axis; a second one of its kind is gathered.
                    inputs.append(GatheredSpec.of(before, placements, call.name))
                    continue
            inputs.append(with_placements(before, placements))
        outputs = _outputs(result, decision)
        arguments = {
            index: value(_first(outputs)) if callable(value) else value
            for index, value in decision.arguments.items()
        }
        return _output_sharding(call, result, inputs, outputs, arguments)

    def _ask(self, schema: OpSchema, decision: AxisDecision) -> OutputSharding | None:
        try:
            return self.inner(schema)
        except NotImplementedError:
            if not decision.elementwise:
                raise
        return _elementwise(schema, self.propagator)

    def _gathered(self, call: OperatorCall) -> OutputSharding:
        """Decides without a rule: for replicas in place of this kind of placement."""
        _refuse_in_place(call, self.kind)
        given = [_without_axis(spec, self.kind) for spec in call.specs]
        result = self.inner(_with_specs(call.schema, given))
        schema = result.redistribute_schema
        wanted = given if schema is None else _specs_of(schema, call)
        inputs: list[DTensorSpec] = []
        for before, want in zip(call.specs, wanted, strict=True):
            placements = tuple(want.placements)
            if any(isinstance(p, self.kind) for p in before.placements):
                inputs.append(GatheredSpec.of(before, placements, call.name))
            else:
                inputs.append(with_placements(before, placements))
        return _output_sharding(call, result, inputs, result.output_spec, {})


def _is_shard(on_axis: AxisPlacement) -> bool:
    """Whether a decision's placement holds what a Shard holds, so that torch may move it."""
    placement = on_axis.placement
    return isinstance(placement, InterleavedShard) and placement.interleaves == 1


def _elementwise(schema: OpSchema, propagator: Any) -> OutputSharding | None:
    """Decides an elementwise operator for which torch has no strategy.

    None where operands of one shape are placed differently, or a sum would be changed unreduced.
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
        with_placements(each.spec, tuple(each.spec.placements), meta)
        for each, meta in zip(leads, metas, strict=True)
    ]
    return OutputSharding(type(metas)(specs))


def _without_axis(
    spec: DTensorSpec, kind: type, on_axis: AxisPlacement | None = None, *, as_shard: bool = False
) -> DTensorSpec:
    """The spec that the inner layer gets, without placements of this kind and the decision."""
    placements: Placements = tuple(
        Replicate() if isinstance(placement, kind) else placement for placement in spec.placements
    )
    if on_axis is not None:
        seen: Placement = Replicate()
        if as_shard and isinstance(on_axis.placement, InterleavedShard):
            seen = Shard(on_axis.placement.dim)
        placements = replace_axis(placements, on_axis.axis, seen)
    return spec if placements == spec.placements else with_placements(spec, placements)


def _outputs(result: OutputSharding, decision: AxisDecision) -> object:
    specs: object = result.output_spec
    if isinstance(specs, DTensorSpec):
        return _placed(specs, decision.outputs[0], decision)
    if not isinstance(specs, list | tuple):
        return None
    many = decision.outputs if len(decision.outputs) > 1 else decision.outputs * len(specs)
    placed = [
        None if spec is None else _placed(spec, on_axis, decision)
        for spec, on_axis in zip(specs, many, strict=True)
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
        interleaves, placement = placement.interleaves, native
        if isinstance(native, _StridedShard):  # a dim flattened behind another; no Shard in 2.12+
            placement = InterleavedShard(native.dim, interleaves * int(native.split_factor))
        elif isinstance(native, Shard):
            placement = InterleavedShard(native.dim, interleaves)
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
                f"{call.name}: would have to move its first argument, which it writes to, from "
                f"{call.args[0].placements} to {first.placements}"
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
    """The schema with other specs for its tensors, in order."""
    remaining = iter(specs)
    args, kwargs = pytree.tree_map(
        lambda leaf: next(remaining) if isinstance(leaf, DTensorSpec) else leaf,
        (schema.args_schema, schema.kwargs_schema if keywords is None else keywords),
    )
    return OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)


def _specs_of(schema: OpSchema, call: OperatorCall) -> list[DTensorSpec]:
    """The specs that torch requires; its suggestion may omit keyword tensors."""
    specs = list(OperatorCall(schema).specs)
    return specs + list(call.specs[len(specs) :])


def _first(outputs: object) -> DTensorSpec:
    first = outputs if isinstance(outputs, DTensorSpec) else pytree.tree_leaves(outputs)[0]
    assert isinstance(first, DTensorSpec)
    return first


def _draws(call: OperatorCall) -> bool:
    """Whether the call draws random numbers; attention without dropout is tagged, but does not."""
    if torch.Tag.nondeterministic_seeded not in call.op.tags:
        return False
    has_dropout = any(p.name == "dropout_p" for p in call.op._schema.arguments)
    return not has_dropout or call.argument("dropout_p", default=0.0) != 0.0


def _refuse_random(call: OperatorCall) -> None:
    if _draws(call):
        placements = [s.placements for s in call.specs if any(map(is_custom, s.placements))]
        raise random_refused(call.name, placements[0])


def _refuse_in_place(call: OperatorCall, kind: type) -> None:
    if not call.in_place or not isinstance(call.args[0], DTensorSpec):
        return
    placements = call.args[0].placements
    if any(isinstance(placement, kind) for placement in placements):
        raise RuntimeError(
            f"{call.name}: no rule writes in place to placements {placements}; redistribute to "
            f"Replicate first, or use the operator's out-of-place form"
        )


def _refuse_moved_keywords(call: OperatorCall, inputs: list[DTensorSpec]) -> None:
    for operand, after in zip(call.operands, inputs, strict=True):
        if isinstance(operand.argument, str) and operand.spec.placements != after.placements:
            raise RuntimeError(
                f"{call.name}: its keyword tensor {operand.argument}= is placed as "
                f"{operand.spec.placements}, but must be {after.placements}; torch does not "
                f"redistribute keyword arguments"
            )
