"""The entries of a plan that apply to a pipeline stage, a part of the plan's model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from plan_api.lowering.model_names import named_state, resolve_argument
from plan_api.spec.entry import Entry
from plan_api.spec.path import PathKind

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
        matched = own.matched(entry)
        if not matched and whole.matched(entry):
            continue  # all that it names is on other stages
        if entry.path.kind is PathKind.OUTPUT and "" in matched and not last:
            matched.remove("")
            if not matched:
                continue
            raise _mixed(entry, "the output of the model", "", matched)
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
    state: dict[str, bool]  # whether it is a parameter

    @classmethod
    def of(cls, model: nn.Module) -> _Names:
        state = {name: isinstance(one, nn.Parameter) for name, one in named_state(model)}
        return cls(dict(model.named_modules(remove_duplicate=False)), state)

    def matched(self, entry: Entry) -> list[str]:
        """Returns the names that an entry matches."""
        if entry.path.kind is PathKind.STATE:
            return [name for name in self.state if entry.path.matches(name)]
        if entry.path.kind is PathKind.GRADIENT:
            return [
                name
                for name, is_param in self.state.items()
                if is_param and entry.path.matches(name)
            ]
        return [name for name in self.modules if entry.path.matches(name)]


def _has_argument(entry: Entry, name: str, module: nn.Module) -> bool:
    try:
        resolve_argument(entry.description, name, module, entry.path.index)
    except ValueError:
        return False
    return True


def _mixed(entry: Entry, what: str, missing: str, present: list[str]) -> ValueError:
    return ValueError(
        f"{entry.description}: expected {what} of modules that are all whole on this stage, got "
        f"{missing or 'the model'!r}, which a stage calls otherwise, beside {present[0]!r}; add an "
        f"entry for each"
    )
