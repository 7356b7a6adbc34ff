"""The entries of a plan that apply to a pipeline stage, a part of the plan's model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from plan_api.lowering.model_names import named_state, resolve_argument
from plan_api.lowering.precision import names_layers
from plan_api.spec.entry import Entry, EntryKind
from plan_api.spec.path import PathKind, TensorPath

__all__ = ["entries_of_stage"]


def entries_of_stage(
    entries: Iterable[Entry], stage: nn.Module, model: nn.Module, *, last: bool
) -> Iterator[Entry]:
    """Yields the entries that apply to a stage; see `Plan.for_stage`.

    Raises:
        ValueError: an entry names an argument that some of its modules in the stage lack.
    """
    own, whole = _Names.of(stage), _Names.of(model)
    for entry in entries:
        matched, in_model = own.matched(entry), whole.matched(entry)
        if entry.path.kind in (PathKind.STATE, PathKind.GRADIENT):
            yield from _under_other_names(entry, in_model, own, whole)
        if not matched and in_model:
            continue  # all that it names is on other stages
        if entry.kind is EntryKind.PRECISION and (
            names_layers(entry, model) and not names_layers(entry, stage)
        ):
            continue  # of the stage it names other modules only
        if entry.path.kind is PathKind.OUTPUT and "" in matched and not last:
            matched.remove("")
            if not matched:
                continue
            raise _mixed(entry, "the output", "", matched)
        if entry.path.kind is PathKind.INPUT:
            missing = [
                name for name in matched if not _has_argument(entry, name, own.modules[name])
            ]
            if missing and len(missing) == len(matched):
                continue  # the stage gets other arguments than the model
            if missing:
                present = [name for name in matched if name not in missing]
                raise _mixed(entry, "an argument", missing[0], present)
        yield entry


class _Names(NamedTuple):
    """What a model has by name: modules, and parameters and buffers."""

    modules: dict[str, nn.Module]
    state: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> _Names:
        return cls(dict(model.named_modules(remove_duplicate=False)), dict(named_state(model)))

    def matched(self, entry: Entry) -> list[str]:
        """Returns the names that an entry matches."""
        if entry.path.kind is PathKind.STATE:
            return [name for name in self.state if entry.path.matches(name)]
        if entry.path.kind is PathKind.GRADIENT:
            params = (name for name, one in self.state.items() if isinstance(one, nn.Parameter))
            return [name for name in params if entry.path.matches(name)]
        return [name for name in self.modules if entry.path.matches(name)]


def _under_other_names(
    entry: Entry, matched: Iterable[str], own: _Names, whole: _Names
) -> Iterator[Entry]:
    """Yields an entry for each tensor that the stage has under another name only, as it is tied."""
    tensors = {id(whole.state[name]) for name in matched if name not in own.state}
    for name, tensor in whole.state.items():
        if id(tensor) in tensors and name in own.state and not entry.path.matches(name):
            yield replace(entry, path=TensorPath(name, re.escape(name), entry.path.kind))


def _has_argument(entry: Entry, name: str, module: nn.Module) -> bool:
    try:
        resolve_argument(entry.description, name, module, entry.path.index)
    except ValueError:
        return False
    return True


def _mixed(entry: Entry, what: str, missing: str, present: list[str]) -> ValueError:
    return ValueError(
        f"{entry.description}: expected modules of which the stage has {what} of all or of none, "
        f"got {missing or 'the model'!r}, of which it has not, and {present[0]!r}, of which it "
        f"has; add an entry for each"
    )
