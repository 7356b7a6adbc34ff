"""The seam in sharding propagation: rules of ours for one axis, joined to stock's for the others.

The layers, outermost first: ragged axes, interleaved axes, stock. Each takes its axis off the
inputs, asks the next layer about the rest, and puts its own answer on. An operator that no rule
knows gets its inputs gathered (fallback.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _pytree as pytree

from ragged_shard.fallback import GatheredSpec
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ops import interleaving, table
from ragged_shard.placing import random_refused
from ragged_shard.question import Answer, OnAxis, Question, Rule
from ragged_shard.ragged import RaggedShard
from ragged_shard.spec import (
    Placements,
    any_ours,
    is_ours,
    put,
    with_placements,
)


def propagate_op_sharding(
    stock: Callable[..., OutputSharding], propagator: object, op_schema: OpSchema
) -> OutputSharding:
    """`ShardingPropagator.propagate_op_sharding_non_cached`, knowing our placements.

    Args:
        stock: torch's own method.
        propagator: its self.
        op_schema: the operator and the specs of its inputs.

    Raises:
        RuntimeError: a random operator; an in-place operator without a rule; a keyword tensor that
            would have to be redistributed.
    """
    question = Question(op_schema)

    def ask_stock(schema: OpSchema) -> OutputSharding:
        return stock(propagator, schema)

    def ask_interleaved(schema: OpSchema) -> OutputSharding:
        layer = _Layer(InterleavedShard, interleaving.rule_for, ask_stock, propagator)
        return layer.propagate(Question(schema))

    if not any(any_ours(spec.placements) for spec in question.specs):
        return stock(propagator, op_schema)
    return _Layer(RaggedShard, table.rule_for, ask_interleaved, propagator).propagate(question)


@dataclass(frozen=True)
class _Layer:
    """Decides the axes with placements of one kind, and asks the inner layer about the rest.

    Attributes:
        kind: class of the placements.
        rule_for: the table of rules.
        inner: the next layer, or stock.
        propagator: torch's, for the shapes of results.
    """

    kind: type
    rule_for: Callable[[Question], Rule | None]
    inner: Callable[[OpSchema], OutputSharding]
    propagator: Any

    def propagate(self, question: Question) -> OutputSharding:
        """The decision about an operator call."""
        if not any(isinstance(p, self.kind) for spec in question.specs for p in spec.placements):
            return self.inner(question.schema)
        _refuse_random(question)
        rule = self.rule_for(question)
        answer = None if rule is None else rule(question)
        joined = None if answer is None else self._joined(question, answer)
        return joined or self._gathered(question)

    def _joined(self, question: Question, answer: Answer) -> OutputSharding | None:
        """Stock's answer about the other axes with ours put on; None where they do not fit."""
        given = [
            _stood_in(spec, self.kind, on_axis, as_shard=answer.as_shard)
            for spec, on_axis in zip(question.specs, answer.inputs, strict=True)
        ]
        result = self._ask(_with_specs(question.schema, given), answer)
        if result is None:
            return None
        schema = result.redistribute_schema
        wanted = given if schema is None else _specs_of(schema, question)
        inputs: list[DTensorSpec] = []
        for before, asked, want, on_axis in zip(
            question.specs, given, wanted, answer.inputs, strict=True
        ):
            placements: Placements = tuple(want.placements)
            if on_axis is not None:
                moved = placements[on_axis.axis] != asked.placements[on_axis.axis]
                if moved and not _is_shard(on_axis):
                    return None  # stock would move this axis: it has its reasons, and gathers
                if not moved:
                    placements = put(placements, on_axis.axis, on_axis.placement)
                others = put(before.placements, on_axis.axis, Replicate())
                if any(isinstance(placement, self.kind) for placement in others):
                    # A rule decides one axis; a second one of its kind is gathered.
                    inputs.append(GatheredSpec.of(before, placements, question.name))
                    continue
            inputs.append(with_placements(before, placements))
        outputs = _outputs(result, answer)
        arguments = {
            index: value(_first(outputs)) if callable(value) else value
            for index, value in answer.arguments.items()
        }
        return _output_sharding(question, result, inputs, outputs, arguments)

    def _ask(self, schema: OpSchema, answer: Answer) -> OutputSharding | None:
        try:
            return self.inner(schema)
        except NotImplementedError:
            if not answer.elementwise:
                raise
        return _elementwise(schema, self.propagator)

    def _gathered(self, question: Question) -> OutputSharding:
        """What happens without a rule: replicas in place of ours, and stock's answer."""
        _refuse_in_place(question, self.kind)
        given = [_stood_in(spec, self.kind) for spec in question.specs]
        result = self.inner(_with_specs(question.schema, given))
        schema = result.redistribute_schema
        wanted = given if schema is None else _specs_of(schema, question)
        inputs: list[DTensorSpec] = []
        for before, want in zip(question.specs, wanted, strict=True):
            placements = tuple(want.placements)
            if any(isinstance(p, self.kind) for p in before.placements):
                inputs.append(GatheredSpec.of(before, placements, question.name))
            else:
                inputs.append(with_placements(before, placements))
        return _output_sharding(question, result, inputs, result.output_spec, {})


def _is_shard(on_axis: OnAxis) -> bool:
    """Whether an answer's placement holds what a Shard of stock's holds, so stock may move it."""
    placement = on_axis.placement
    return isinstance(placement, InterleavedShard) and placement.interleaves == 1


def _elementwise(schema: OpSchema, propagator: Any) -> OutputSharding | None:
    """The decision about an elementwise operator that stock has no strategy for.

    None where operands of one shape are placed differently, or a sum would be changed unreduced.
    """
    question = Question(schema)
    [lead, *others] = question.operands
    if any(p.is_partial() for spec in question.specs for p in spec.placements):
        return None
    for operand in others:
        leading = lead if operand.item is None else question.lead_of(operand)
        if operand.spec.placements != leading.spec.placements and operand.shape.numel() > 1:
            return None
    metas = propagator._propagate_tensor_meta(schema)
    if metas is None or len(question.op._schema.returns) == 0:
        return OutputSharding(output_spec=None)
    if isinstance(metas, TensorMeta):
        return OutputSharding(with_placements(lead.spec, tuple(lead.spec.placements), metas))
    leads = [operand for operand in question.operands if operand.argument == lead.argument]
    specs = [
        with_placements(each.spec, tuple(each.spec.placements), meta)
        for each, meta in zip(leads, metas, strict=True)
    ]
    return OutputSharding(type(metas)(specs))


def _stood_in(
    spec: DTensorSpec, kind: type, on_axis: OnAxis | None = None, *, as_shard: bool = False
) -> DTensorSpec:
    """What the inner layer sees of an input: neither the placements of this kind nor the answer."""
    placements: Placements = tuple(
        Replicate() if isinstance(placement, kind) else placement for placement in spec.placements
    )
    if on_axis is not None:
        seen: Placement = Replicate()
        if as_shard and isinstance(on_axis.placement, InterleavedShard):
            seen = Shard(on_axis.placement.dim)
        placements = put(placements, on_axis.axis, seen)
    return spec if placements == spec.placements else with_placements(spec, placements)


def _outputs(result: OutputSharding, answer: Answer) -> object:
    specs: object = result.output_spec
    if isinstance(specs, DTensorSpec):
        return _placed(specs, answer.outputs[0], answer)
    if not isinstance(specs, list | tuple):
        return None
    many = answer.outputs if len(answer.outputs) > 1 else answer.outputs * len(specs)
    placed = [
        None if spec is None else _placed(spec, on_axis, answer)
        for spec, on_axis in zip(specs, many, strict=True)
    ]
    return type(specs)(placed)


def _placed(spec: DTensorSpec, on_axis: OnAxis | None, answer: Answer) -> DTensorSpec:
    if on_axis is None:
        return spec
    placement, stock = on_axis.placement, spec.placements[on_axis.axis]
    if answer.as_shard:
        assert isinstance(placement, InterleavedShard)
        interleaves, placement = placement.interleaves, stock
        if isinstance(stock, _StridedShard):  # a dim flattened behind another; no Shard in 2.12+
            placement = InterleavedShard(stock.dim, interleaves * int(stock.split_factor))
        elif isinstance(stock, Shard):
            placement = InterleavedShard(stock.dim, interleaves)
    return with_placements(spec, put(spec.placements, on_axis.axis, placement))


def _output_sharding(
    question: Question,
    result: OutputSharding,
    inputs: list[DTensorSpec],
    outputs: object,
    arguments: dict[int, object],
) -> OutputSharding:
    moved = any(
        before.placements != after.placements
        for before, after in zip(question.specs, inputs, strict=True)
    )
    _refuse_moved_keywords(question, inputs)
    if question.in_place and isinstance(question.args[0], DTensorSpec) and moved:
        [first, *_] = inputs
        if first.placements != question.args[0].placements:
            raise RuntimeError(
                f"{question.name}: would have to move its first argument, which it writes to, from "
                f"{question.args[0].placements} to {first.placements}"
            )
    rewritten = result.use_val_from_redistribute_schema or bool(arguments)
    if not moved and not rewritten:
        return OutputSharding(output_spec=outputs)
    base = result.redistribute_schema or question.schema
    schema = _with_specs(base, inputs, keywords=question.schema.kwargs_schema)
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


def _specs_of(schema: OpSchema, question: Question) -> list[DTensorSpec]:
    """The specs that stock wants; its suggestions may leave the keywords out."""
    specs = list(Question(schema).specs)
    return specs + list(question.specs[len(specs) :])


def _first(outputs: object) -> DTensorSpec:
    first = outputs if isinstance(outputs, DTensorSpec) else pytree.tree_leaves(outputs)[0]
    assert isinstance(first, DTensorSpec)
    return first


def _draws(question: Question) -> bool:
    """Whether the call draws random numbers; attention without dropout is tagged, but does not."""
    if torch.Tag.nondeterministic_seeded not in question.op.tags:
        return False
    has_dropout = any(p.name == "dropout_p" for p in question.op._schema.arguments)
    return not has_dropout or question.argument("dropout_p", default=0.0) != 0.0


def _refuse_random(question: Question) -> None:
    if _draws(question):
        placements = [s.placements for s in question.specs if any(map(is_ours, s.placements))]
        raise random_refused(question.name, placements[0])


def _refuse_in_place(question: Question, kind: type) -> None:
    if not question.in_place or not isinstance(question.args[0], DTensorSpec):
        return
    placements = question.args[0].placements
    if any(isinstance(placement, kind) for placement in placements):
        raise RuntimeError(
            f"{question.name}: no rule writes in place to placements {placements}; redistribute to "
            f"Replicate first, or use the operator's out-of-place form"
        )


def _refuse_moved_keywords(question: Question, inputs: list[DTensorSpec]) -> None:
    for operand, after in zip(question.operands, inputs, strict=True):
        if isinstance(operand.argument, str) and operand.spec.placements != after.placements:
            raise RuntimeError(
                f"{question.name}: its keyword tensor {operand.argument}= is placed as "
                f"{operand.spec.placements}, but must be {after.placements}; torch does not "
                f"redistribute keyword arguments"
            )
