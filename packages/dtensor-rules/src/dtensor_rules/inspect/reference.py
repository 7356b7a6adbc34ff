"""The key of a call, in Python: what key.h and call.cpp do, for tests to compare with.

A key is a list of words of 64 bits: the operator's number, then for each argument of the schema a
tag, or a tag with a value. It is prefix-free: a list says its length, and a value that does not fit
beside its tag follows as a word of its own, which the tag says.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch.distributed.tensor import DTensor

from dtensor_rules import _core
from dtensor_rules.planning import operators
from dtensor_rules.registry import table

_NEXT_WORD = 0x80
_TAG_BITS = 8
_MASK = (1 << 64) - 1


class Tag(IntEnum):
    """What a word says; the numbers are those of key.h."""

    NONE = 0
    UNDEFINED = 1
    DTENSOR = 2
    SCALAR_TENSOR = 3
    INT = 4
    DOUBLE = 5
    COMPLEX = 6
    BOOL = 7
    STRING = 8
    DEVICE = 9
    LIST = 10
    NUMBER = 11


def key_words(op: torch._ops.OpOverload, number: int, arguments: Sequence[object]) -> list[int]:
    """Returns the key of a call.

    Args:
        op: the operator.
        number: its own number, which begins every key of its.
        arguments: a value for each argument of the schema, defaults written out.

    Raises:
        TypeError: an argument that no key can hold.
    """
    words = [number]
    readers = [rule for rule in table.registered() if rule.numbers]
    for value, by_value in zip(arguments, operators.by_value(op, readers), strict=True):
        words += _words(value, by_value)
    return words


def _words(value: object, by_value: bool) -> list[int]:
    if value is None:
        return _tagged(Tag.NONE)
    if isinstance(value, DTensor):
        return _tagged(Tag.DTENSOR, _core.spec_id(value._spec))
    if isinstance(value, torch.Tensor):
        return _scalar_tensor(value)
    if isinstance(value, bool):
        return _number(Tag.BOOL, int(value), by_value)
    if isinstance(value, int):
        return _number(Tag.INT, value & _MASK, by_value)
    if isinstance(value, float):
        return _number(Tag.DOUBLE, _bits(value), by_value)
    if isinstance(value, complex):
        real, imaginary = _bits(value.real), _bits(value.imag)
        return _number(Tag.COMPLEX, real, by_value) + _number(Tag.COMPLEX, imaginary, by_value)
    if isinstance(value, str):
        return _string(value.encode())
    if isinstance(value, (list, tuple)):
        flags = by_value or all(isinstance(item, int) for item in value)
        items = [word for item in value for word in _words(item, flags)]
        return _tagged(Tag.LIST, len(value)) + items
    raise TypeError(f"key_words: {value!r} of type {type(value).__name__} is in no key")


def _tagged(tag: Tag, value: int | None = None) -> list[int]:
    if value is None:
        return [int(tag)]
    if value >> (64 - _TAG_BITS) == 0:
        return [tag | value << _TAG_BITS]
    return [tag | _NEXT_WORD, value]


def _number(tag: Tag, value: int, by_value: bool) -> list[int]:
    return _tagged(tag, value) if by_value else _tagged(Tag.NUMBER, int(tag))


def _bits(number: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", number))[0])


def _string(text: bytes) -> list[int]:
    padded = text + bytes(-len(text) % 8)
    words = struct.unpack(f"<{len(padded) // 8}Q", padded)
    return [*_tagged(Tag.STRING, len(text)), *words]


def _scalar_tensor(tensor: torch.Tensor) -> list[int]:
    # Bit 8 says that it is a number of the user's, which torch has wrapped: none that Python sees.
    if tensor.dim() != 0:
        raise TypeError(f"key_words: a plain tensor of shape {tuple(tensor.shape)} is in no key")
    index: int | None = tensor.device.index
    value = (
        _core.scalar_type(tensor.dtype)
        | _core.device_type(tensor.device) << 9
        | ((-1 if index is None else index) & 0xFF) << 17
    )
    return _tagged(Tag.SCALAR_TENSOR, value)
