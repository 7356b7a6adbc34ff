"""From the paths of a plan to the tensors and modules of one model."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from plan_api.lowering.ir import Act, Moment, Op
from plan_api.spec.entry import Entry
from plan_api.spec.path import Kind, TensorPath
from plan_api.spec.plan import Plan
from plan_api.spec.verb import Verb

__all__ = ["argument_of", "fully_sharded", "is_inside", "resolve", "state_of", "stays_eager"]

_ACTS = {
    Verb.SHARD: Act.REDIST,
    Verb.REDISTRIBUTE: Act.REDIST,
    Verb.ANNOTATE: Act.ANNOTATE,
    Verb.FACTORY: Act.FACTORY,
    Verb.LOCAL: Act.LOCAL,
    Verb.INDEX: Act.INDEX,
    Verb.DISPATCH: Act.DISPATCH,
    Verb.CONTEXT: Act.CONTEXT,
    Verb.SEQUENCE: Act.ORDER,
}
_WITH_OPTIONS = (Verb.CONTEXT, Verb.SEQUENCE)


@dataclass(frozen=True)
class _Place:
    """Where one entry applies: a module, a moment, and a tensor there."""

    path: str
    moment: Moment
    tensor: str
    index: int | str


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all their names; a tied one comes under each."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def fully_sharded(plan: Plan, model: nn.Module) -> dict[str, tuple[Entry, ...]]:
    """The modules that fsdp is asked for, each with the entries that name it; the last holds."""
    found: dict[str, tuple[Entry, ...]] = {}
    for entry in plan.entries:
        if entry.verb is Verb.FULLY_SHARD:
            for name, _ in model.named_modules():
                if entry.path.matches(name):
                    found[name] = (*found.get(name, ()), entry)
    return found


def stays_eager(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """The modules that stay on DTensors in static mode; none of them is inside of another."""
    paths = [
        name
        for name, _ in model.named_modules()
        for entry in plan.entries
        if entry.verb is Verb.EAGER and entry.path.matches(name)
    ]
    return tuple(
        path
        for path in dict.fromkeys(paths)
        if not any(is_inside(path, other) for other in paths if other != path)
    )


def is_inside(path: str, module: str) -> bool:
    """Whether a path is a module's, or of something in it."""
    return not module or path == module or path.startswith(f"{module}.")


def resolve(plan: Plan, model: nn.Module) -> list[Op]:
    """The operations of a plan on a model, in the order of its entries.

    Args:
        plan: any.
        model: its modules and tensors may be on any device, ``meta`` included.

    Raises:
        ValueError: entries that match nothing, all of them, with what they may have meant; a
            tensor dim that does not exist; an argument that `forward` does not have.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    state = dict(state_of(model))
    first: dict[int, str] = {}  # of the names of a tied tensor
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    ops, problems = [], []
    for number, entry in enumerate(plan.entries):
        names = state if _of_state(entry) else modules
        matched = [name for name in names if entry.path.matches(name)]
        if entry.path.kind is Kind.GRADIENT:
            matched = [name for name in matched if state[name].requires_grad]
        if not matched:
            problems.append(_unmatched(entry, names))
            continue
        try:
            if names is state:
                matched = list(dict.fromkeys(first[id(state[name])] for name in matched))
                for name in matched:
                    _check_dims(entry, name, state[name])
            places = [
                (said, _place(said, name, modules))
                for said in (entry, *_of_shifted(entry))
                for name in matched
            ]
        except ValueError as error:
            problems.append(str(error))
            continue
        if entry.verb in _ACTS:
            ops += [op for said, place in places for op in _ops(said, number, place)]
    if problems:
        raise ValueError("the plan does not fit the model:\n" + "\n".join(problems))
    return ops


def _ops(entry: Entry, number: int, place: _Place) -> Iterator[Op]:
    phase = entry.verb is Verb.SHARD and place.moment.of_state
    act = Act.SHARD if phase else _ACTS[entry.verb]
    options = entry.options if entry.verb in _WITH_OPTIONS else ()
    for at, axis in enumerate(entry.axes):
        op = Op(
            place.path, place.moment, place.tensor, place.index, act, axis, entry.dst[at],
            None if entry.src is None else entry.src[at],
            None if entry.grad_dst is None else entry.grad_dst[at],
            None if entry.grad_src is None else entry.grad_src[at],
            number, options, entry.line,
        )  # fmt: skip
        yield op
        if act is Act.ORDER and place.moment is Moment.FORWARD_PRE:  # what enters is cut, too
            yield replace(op, act=Act.REDIST, options=())


def _place(entry: Entry, name: str, modules: dict[str, nn.Module]) -> _Place:
    path = entry.path
    if entry.verb is Verb.FACTORY:
        return _Place(name, Moment.FORWARD_PRE, "<new>", 0)
    if entry.verb is Verb.CONTEXT:
        return _Place(name, Moment.FORWARD_PRE, "<attention>", 0)
    if entry.verb is Verb.LOCAL:
        return _Place(name, Moment.FORWARD, Kind.OUTPUT.value, 0)
    if path.kind in (Kind.STATE, Kind.GRADIENT):
        module, _, tensor = name.rpartition(".")
        moment = Moment(entry.phase.value)
        if path.kind is Kind.GRADIENT:
            moment = Moment.GRAD
        elif entry.verb is Verb.REDISTRIBUTE:
            moment = Moment.RUN
        return _Place(module, moment, tensor, 0)
    if path.kind is Kind.OPERATOR:
        return _Place(name, Moment.OPERATOR, path.kind.value, path.index)
    if path.kind is Kind.INPUT:
        index = argument_of(entry, name, modules[name], path.index)
        counts = entry.verb in (Verb.INDEX, Verb.DISPATCH)
        tensor = "<index>" if counts else path.kind.value
        return _Place(name, Moment.FORWARD_PRE, tensor, index)
    return _Place(name, Moment.FORWARD, path.kind.value, path.index)


def _of_shifted(entry: Entry) -> Iterator[Entry]:
    """What an entry that shifts labels (`Plan.sequence`) says of the argument that takes them."""
    options = dict(entry.options)
    shift = options.pop("shift", None)
    if shift is not None:
        path = replace(entry.path, index=shift)
        yield replace(entry, path=path, options=tuple(options.items()))


def argument_of(entry: Entry, name: str, module: nn.Module, index: int | str) -> int | str:
    """The place of an argument that may be given by name too; else its name.

    Args:
        entry: that names it.
        name: of the module.
        module: whose forward has it.
        index: its number, or its name.

    Raises:
        ValueError: there is none.
    """
    parameters = list(inspect.signature(module.forward).parameters.values())
    kinds = {one.kind for one in parameters}
    places = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    if isinstance(index, int):
        if index >= len(places) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise ValueError(
                f"{entry.said}: forward of {name or 'the model'} ({type(module).__name__}) has "
                f"{len(places)} arguments: {', '.join(places)}"
            )
        return index
    if index in places:
        return places.index(index)
    named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    if index in named or inspect.Parameter.VAR_KEYWORD in kinds:
        return index
    raise ValueError(
        f"{entry.said}: forward of {name or 'the model'} ({type(module).__name__}) has no argument "
        f"{index!r}{_meant(index, [*places, *named])}"
    )


def _check_dims(entry: Entry, name: str, tensor: torch.Tensor) -> None:
    for placement in entry.dst:
        dim = getattr(placement, "dim", None)
        if isinstance(dim, int) and dim >= tensor.ndim:
            raise ValueError(
                f"{entry.said}: {name} has shape {tuple(tensor.shape)}: there is no dim {dim}"
            )


def _unmatched(entry: Entry, names: Iterable[str]) -> str:
    what = "parameter or buffer" if _of_state(entry) else "module"
    return f"{entry.said}: no {what} has this name{_meant(_plain(entry.path), names)}"


def _of_state(entry: Entry) -> bool:
    return entry.path.kind in (Kind.STATE, Kind.GRADIENT)


def _plain(path: TensorPath) -> str:
    """A regular expression as the name that it resembles most."""
    text = re.sub(r"\\d[+*]?|\[0-9\][+*]?|\.\*", "0", path.pattern)
    return text.replace("\\", "")


def _meant(wanted: str, names: Iterable[str]) -> str:
    """A question for the names that are nearest to a wanted one; "" if none is near."""
    nearest: dict[str, tuple[float, str]] = {}  # of layers that differ by number only one
    for name in filter(None, names):
        found, form = (_likeness(wanted, name), name), re.sub(r"\d+", "0", name)
        if form not in nearest or found[0] > nearest[form][0]:
            nearest[form] = found
    best = max((likeness for likeness, _ in nearest.values()), default=0.0)
    ranked = sorted(nearest.values(), key=lambda found: -found[0])
    close = [name for likeness, name in ranked if likeness >= max(0.6, best - 0.1)][:3]
    if not close:
        tails: dict[str, str] = {}
        for _, name in nearest.values():
            tails.setdefault(name.rpartition(".")[2], name)
        last = wanted.rpartition(".")[2]
        close = [tails[one] for one in difflib.get_close_matches(last, tails, 3, 0.6)]
    return "; did you mean " + " or ".join(map(repr, close)) + "?" if close else ""


def _likeness(wanted: str, name: str) -> float:
    """Of two names, 0 to 1: the mean over their parts between dots where they have as many.

    Compared as a whole, a wrong number costs a character and a typo in a word several.
    """
    parts, others = wanted.split("."), name.split(".")
    if len(parts) != len(others):
        parts, others = [wanted], [name]
    ratios = [
        difflib.SequenceMatcher(None, part, other).ratio()
        for part, other in zip(parts, others, strict=True)
    ]
    return sum(ratios) / len(ratios)
