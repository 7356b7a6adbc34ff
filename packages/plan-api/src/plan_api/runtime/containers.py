"""Tensors in the inputs and outputs of modules: nested tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["map_tensors", "replace_part"]


def map_tensors(value: Any, transform: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Applies a function to every tensor in a structure; returns the same object if none changes.

    Args:
        value: a tensor, or any nesting of what pytree knows and dataclasses.
        transform: returns a tensor for a tensor.
    """
    if isinstance(value, torch.Tensor):
        return transform(value)
    if _is_dataclass(value):
        parts = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init
        }
        mapped = {name: map_tensors(part, transform) for name, part in parts.items()}
        changed = {name: part for name, part in mapped.items() if part is not parts[name]}
        return dataclasses.replace(value, **changed) if changed else value
    leaves, structure = pytree.tree_flatten(value, is_leaf=_is_dataclass)
    if len(leaves) == 1 and leaves[0] is value:
        return value  # no container
    changed_leaves = [map_tensors(leaf, transform) for leaf in leaves]
    if all(new is old for new, old in zip(changed_leaves, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(changed_leaves, structure)


def replace_part(
    value: Any, index: int | str, transform: Callable[[torch.Tensor], torch.Tensor], what: object
) -> Any:
    """Applies a function to one part of what a module returned.

    Args:
        value: a tensor or None, which have the part 0, or a tuple, list, dict or dataclass.
        index: the part's number, or its key or field.
        transform: returns a tensor for a tensor.
        what: begins messages, as text, which is read for these only.

    Raises:
        ValueError: there is no such part.
    """
    if isinstance(value, torch.Tensor) and index == 0:
        return transform(value)
    if isinstance(value, Mapping) or _is_dataclass(value):
        return _replace_named(value, index, transform, what)
    if isinstance(value, (tuple, list)) and isinstance(index, int) and index < len(value):
        part = map_tensors(value[index], transform)
        if part is value[index]:
            return value
        parts = [*value[:index], part, *value[index + 1 :]]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if value is None:
        return None
    raise ValueError(f"{what}: there is no part {index!r} in a {_described(value)}")


def _replace_named(
    value: Any, index: int | str, transform: Callable[[torch.Tensor], torch.Tensor], what: object
) -> Any:
    # Transformers' outputs are dataclasses and mappings, which leave out fields that are None.
    fields = _fields(value)
    if isinstance(index, int):
        if index >= len(fields):
            raise ValueError(f"{what}: there is no part {index} in a {_described(value)}")
        index = fields[index]
    if index not in fields:
        if _is_dataclass(value) and getattr(value, index, value) is None:
            return value  # such as the loss of a model without labels
        raise ValueError(f"{what}: there is no part {index!r} in a {_described(value)}")
    mapping = isinstance(value, Mapping)
    old = value[index] if mapping else getattr(value, index)
    new = map_tensors(old, transform)
    if new is old:
        return value
    if _is_dataclass(value) and not mapping:
        return dataclasses.replace(value, **{index: new})
    if _is_dataclass(value):
        setattr(value, index, new)  # sets the field and the key
        return value
    copied = dict(value)
    copied[index] = new
    return copied if type(value) is dict else type(value)(copied)


def _fields(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return list(value)
    return [field.name for field in dataclasses.fields(value)]


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, Mapping) or _is_dataclass(value):
        return f"{type(value).__name__} with {', '.join(_fields(value))}"
    return type(value).__name__
