"""The words in which a rule names placements and kinds of operators."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

KINDS = ("*", "functional", "in-place", "out-given", "view")

_WORD = re.compile(r"\*|replicate|shard(?:\((\d+)\))?|partial(?:\((\w+)\))?|[A-Z_]\w*")


def is_word(word: str) -> bool:
    """Whether a placement can be named so."""
    return _WORD.fullmatch(word) is not None


def fits(word: str, placement: Placement) -> bool:
    """Whether a word names a placement.

    Args:
        word: ``*``, ``replicate``, ``shard``, ``shard(0)``, ``partial``, ``partial(sum)``, or the
            name of a class of placements. The words in small letters mean torch's own classes and
            no subclasses of them, which may mean something else.
        placement: of one mesh axis.
    """
    if word == "*":
        return True
    name, _, detail = word.rstrip(")").partition("(")
    if name == "replicate":
        return type(placement) is Replicate
    if name == "shard":
        return type(placement) is Shard and detail in ("", str(placement.dim))
    if name == "partial":
        return type(placement) is Partial and detail in ("", placement.reduce_op)
    return type(placement).__name__ == name


def fit_on_an_axis(words: Sequence[str], specs: Sequence[DTensorSpec]) -> bool:
    """Whether the tensors have these placements, one word each, on at least one mesh axis."""
    if len(words) != len(specs):
        return False
    axes = zip(*(spec.placements for spec in specs), strict=True)
    return any(all(map(fits, words, placements)) for placements in axes)


def kinds_of(op: torch._ops.OpOverload) -> set[str]:
    """Returns the kinds of an operator: ``view``, ``in-place``, ``out-given``, ``functional``.

    An in-place operator is ``out-given`` as well: the tensor it writes says what the result is.
    """
    arguments = op._schema.arguments
    if any(argument.is_out for argument in arguments):
        return {"out-given"}
    if is_in_place(op):
        return {"in-place", "out-given"}
    if op._schema._is_view_op():
        return {"view"}
    return {"functional"}


def is_in_place(op: torch._ops.OpOverload) -> bool:
    """Whether the operator writes its first argument and is named for it (as operator.cpp)."""
    arguments = op._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return op._schema.name.endswith("_") and alias is not None and alias.is_write
