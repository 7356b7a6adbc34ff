"""Finds redistributions that several users of a tensor share, and gradients to reduce at once.

Four things make a step of Eager communicate more than a person would write:

- an output that is Partial meets an operator that needs its sum, for which DTensor scatters it, and
  gathers it later: it is reduced where it arises;
- a gradient that is Partial where it leaves a column parallel Linear meets the backward of a norm,
  for which DTensor scatters and later gathers it: it is reduced before that;
- queries, keys and values take the same tensor, and each of their gradients is reduced: the sum
  that autograd makes of them is reduced once, as by Megatron-LM's ``f`` (Shoeybi et al., arXiv
  1909.08053, figure 3);
- each of them gathers the same tensor: it is gathered once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Replicate

from plan_api.lowering.ir import HookPoint, Lowered, OpKind
from plan_api.spec.path import generalize_numbers
from plan_api.static.generation.entries import (
    GeneratedEntry,
    input_gradient_entries,
    redistribute_entry,
)
from plan_api.static.generation.tensor_uses import Place, SharedTensor
from plan_api.static.generation.trace import EagerTrace, TensorTrace

__all__ = ["ADDED_FOR", "SharedRedistribution", "shared_redistributions"]

ADDED_FOR = "added for "  # begins the lines of entries that are added


@dataclass(frozen=True)
class SharedRedistribution:
    """A redistribution that a step of Eager asks for.

    Attributes:
        place: where it is done.
        entry: the entry that does it.
        users: the inputs that ask for it, and need no redistribution of their own then.
    """

    place: Place
    entry: GeneratedEntry
    users: frozenset[Place]


def shared_redistributions(lowered: Lowered, trace: EagerTrace) -> list[SharedRedistribution]:
    """Returns the redistributions to add to a plan; an empty list if it has all of them.

    Args:
        lowered: the plan, lowered.
        trace: of a step of Eager under it.
    """
    outputs = _partial_outputs(lowered, trace)
    if outputs:  # what follows them is placed otherwise afterwards
        return outputs
    asked, reduced = _asked(lowered, trace)
    found: dict[Place, SharedRedistribution] = {}
    for shared in trace.tensors:
        # Entries of an earlier step, too: one of the tensor's users may ask only when others do.
        for users in _equal_users({**reduced, **asked}, shared):
            if users.isdisjoint(asked):
                continue
            for place, served in shared.places_for(users).items():
                if len(served) > 1:
                    entries = [asked.get(user) or reduced[user] for user in served]
                    entry = _entry_at(place, entries, trace)
                    found[place] = SharedRedistribution(place, entry, frozenset(served))
    shared_users = {user for one in found.values() for user in one.users}
    for user, entry in asked.items():
        if user not in shared_users and user not in found and entry.src == entry.dst:
            entry = _entry_at(user, [entry], trace)
            found[user] = SharedRedistribution(user, entry, frozenset({user}))
    return list(found.values())


def _partial_outputs(lowered: Lowered, trace: EagerTrace) -> list[SharedRedistribution]:
    """Reduces the first Partial output that a function would reduce, in all layers alike."""
    found: list[SharedRedistribution] = []
    patterns = set()
    for place, before in trace.reduced_by_functions.items():
        patterns.add(generalize_numbers(place.path))
        if trace.at_site(place) is None and len(patterns) == 1:
            after = tuple(Replicate() if one.is_partial() else one for one in before)
            entry = redistribute_entry(
                place.path, place.tensor, TensorTrace(before, after), lowered.lines_of(place.path)
            )
            found.append(SharedRedistribution(place, entry, frozenset()))
    return found


def _asked(
    lowered: Lowered, trace: EagerTrace
) -> tuple[dict[Place, GeneratedEntry], dict[Place, GeneratedEntry]]:
    """Returns what inputs ask for: redistributions of the plan, and reductions of gradients.

    Returns:
        what they ask for, and the reductions of gradients that the plan does at inputs already.
    """
    asked, reduced = {}, {}
    reducing = set()
    for site in lowered.sites:
        if site.hook_point is not HookPoint.FORWARD_PRE or not site.path:
            continue
        for step in site.moved:
            place = Place(site.path, site.hook_point, step.index)
            traced = trace.at_site(place)
            if step.kind is not OpKind.REDIST or traced is None:
                continue
            if traced.reduces_gradient:
                reducing.add(site.path)
            written = [line.removeprefix(ADDED_FOR) for line in step.lines]
            lines = tuple(dict.fromkeys((*written, *lowered.lines_of(site.path))))
            entry = redistribute_entry(site.path, place.tensor, traced, lines)
            leaves_partial = any(grad.is_partial() for grad in traced.grad_after or ())
            if entry.src != entry.dst or leaves_partial:
                asked[place] = entry
            elif traced.reduces_gradient:
                reduced[place] = entry
    for entry in input_gradient_entries(trace, lowered, reducing):
        index = entry.tensor.removeprefix("<in:").removesuffix(">")
        number = int(index) if index.isdecimal() else index
        asked[Place(entry.path, HookPoint.FORWARD_PRE, number)] = entry
    return asked, reduced


def _equal_users(asked: Mapping[Place, GeneratedEntry], shared: SharedTensor) -> list[set[Place]]:
    """Groups the users of a tensor that ask for the same redistribution of it."""
    groups: dict[object, set[Place]] = {}
    for user in shared.users:
        if user in asked:
            entry = asked[user]
            groups.setdefault((entry.src, entry.dst, entry.grad_dst), set()).add(user)
    return list(groups.values())


def _entry_at(place: Place, entries: Sequence[GeneratedEntry], trace: EagerTrace) -> GeneratedEntry:
    """Returns the entry that does at a place what equal entries ask for at other inputs."""
    first = min(entries, key=lambda entry: entry.path)
    src, grad_dst = first.src, first.grad_dst
    site = trace.at_site(place)
    if site is not None and (place.path, place.tensor) != (first.path, first.tensor):
        # The hook that does the plan's redistribution there does both.
        src, grad_dst = site.before, redistribute_entry("", "", site).grad_dst
    grad_src = first.grad_src
    for entry in entries:
        if any(placement.is_partial() for placement in entry.grad_src or ()):
            grad_src = entry.grad_src
    lines = tuple(dict.fromkeys(line for entry in entries for line in entry.lines))
    return replace(
        first, path=place.path, tensor=place.tensor, src=src, grad_dst=grad_dst,
        grad_src=grad_src, lines=lines,
    )  # fmt: skip
