"""Records which modules and functions share a tensor in one step of Eager.

A tensor is known by its object: modules that take the same object share it, and a gradient that
autograd sums over them can be reduced once, where the tensor comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from plan_api.lowering.ir import HookPoint
from plan_api.lowering.model_names import is_inside, positional_names
from plan_api.ops.redistribute import apply_redistribution

__all__ = ["Place", "SharedTensor", "TensorUses", "Use"]

_Inputs: TypeAlias = dict["Place", DTensor]


@dataclass(frozen=True)
class Place:
    """An input or output of a module.

    Attributes:
        path: of the module.
        hook_point: FORWARD_PRE or FORWARD.
        index: the number or name of the argument or result.
    """

    path: str
    hook_point: HookPoint
    index: int | str

    @property
    def tensor(self) -> str:
        """The tensor as paths of a plan name it, such as ``<in:0>``."""
        kind = "in" if self.hook_point is HookPoint.FORWARD_PRE else "out"
        return f"<{kind}:{self.index}>"


@dataclass(frozen=True)
class Use:
    """A use of a tensor.

    Attributes:
        user: the input that takes it; None: a function, or the script, which gets it returned.
        running: the path of the innermost module that runs; of an input the module around it.
    """

    user: Place | None
    running: str


@dataclass
class SharedTensor:
    """One tensor of a step that requires a gradient, with all that is done with it.

    Attributes:
        places: where a hook could replace it, in the order in which it passes them: outputs that
            return it, and inputs whose module gets it.
        uses: by functions, and by modules without children or with a hook on that input.
        partial_from: by number of a mesh axis along which it is Partial, the output that was first.
        is_reduced_in_code: whether a call of `plan_api.redistribute` made it, or what it is made
            of, and reduces its gradient.
    """

    places: list[Place] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    partial_from: dict[int, Place] = field(default_factory=dict)
    is_reduced_in_code: bool = False

    @property
    def users(self) -> set[Place]:
        """The inputs that take it."""
        return {use.user for use in self.uses if use.user is not None}

    def places_for(self, users: set[Place]) -> dict[Place, set[Place]]:
        """Finds where one redistribution serves several users, and nothing else.

        That is the output of the module that makes the tensor, if all that is done with it is to
        pass it to these users, or else the input of a module around some of them.

        Args:
            users: inputs that take it.

        Returns:
            the users by place; those that share no place are left out.
        """
        found: dict[Place, set[Place]] = {}
        inputs = [one for one in self.places if one.hook_point is HookPoint.FORWARD_PRE]
        for place in sorted(inputs, key=lambda one: one.path.count(".")):
            inside = [use.user for use in self.uses if is_inside(use.running, place.path)]
            served = {user for user in inside if user in users}
            if not served or len(served) < len({*inside}):
                continue  # something else takes it there
            around = [other for other, others in found.items() if served & others]
            if any(found[other] != served for other in around):
                continue  # a module further out serves more
            for other in around:  # the innermost module, as a person would choose it
                del found[other]
            found[place] = served
        made = next((one for one in self.places if one.hook_point is HookPoint.FORWARD), None)
        is_for_all = {use.user for use in self.uses} == users
        if made is not None and is_for_all and users not in found.values():
            return {made: users}
        return found


class TensorUses(TorchFunctionMode):
    """Records the uses of tensors while it is active, around one call of a model.

    Attributes:
        reduced_by_functions: outputs of modules that are Partial, and that a function made another
            tensor of which is not, for which DTensor reduced them; in the order in which it did.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, tuple[DTensor, SharedTensor]] = {}
        self._running: list[str] = []
        self._passed: list[_Inputs] = []  # as the running modules' callers pass them
        self._outputs: dict[Place, DTensor] = {}
        self.reduced_by_functions: dict[Place, DTensor] = {}

    @property
    def tensors(self) -> list[SharedTensor]:
        """All tensors that require a gradient, in the order in which they were first seen."""
        return [shared for _, shared in self._tensors.values()]

    def register_hooks(self, model: nn.Module) -> Iterator[Any]:
        """Registers hooks around all others that the modules have, and yields their handles."""
        for path, module in model.named_modules():
            positional = positional_names(module)
            yield module.register_forward_pre_hook(
                self._enter(path, positional), prepend=True, with_kwargs=True
            )
            yield module.register_forward_pre_hook(
                self._receive(path, positional), with_kwargs=True
            )
            yield module.register_forward_hook(self._leave(path), always_call=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Functions of autograd run without gradients; what they return is another tensor.
        if torch.is_grad_enabled() and any(map(_has_gradient, pytree.tree_leaves(result))):
            running = self._running[-1] if self._running else ""
            results = [leaf for leaf in pytree.tree_leaves(result) if _has_gradient(leaf)]
            for leaf in pytree.tree_leaves((args, kwargs)):
                if not _has_gradient(leaf):
                    continue
                self._of(leaf).uses.append(Use(None, running))
                if func is apply_redistribution:  # it reduces what is Partial itself
                    self._of(result).is_reduced_in_code = args[1].reduces_gradient
                    continue
                self._follow_partial(leaf, results)
                for one in results:
                    self._of(one).is_reduced_in_code |= self._of(leaf).is_reduced_in_code
        return result

    def _follow_partial(self, tensor: DTensor, results: list[DTensor]) -> None:
        """Follows a Partial tensor to what a function makes of it."""
        for axis, place in self._of(tensor).partial_from.items():
            still = [one for one in results if one.placements[axis].is_partial()]
            for one in still:
                self._of(one).partial_from.setdefault(axis, place)
            if not still:
                self.reduced_by_functions.setdefault(place, self._outputs[place])

    def _of(self, tensor: DTensor) -> SharedTensor:
        return self._tensors.setdefault(id(tensor), (tensor, SharedTensor()))[1]

    def _enter(self, path: str, positional: list[str]) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._passed.append(_inputs(path, positional, args, kwargs))
            self._running.append(path)

        return hook

    def _receive(self, path: str, positional: list[str]) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            around = self._running[-2] if len(self._running) > 1 else ""
            passed = self._passed[-1]
            for place, tensor in _inputs(path, positional, args, kwargs).items():
                self._of(tensor).places.append(place)
                if place in passed and passed[place] is not tensor:
                    before = self._of(passed[place])
                    before.uses.append(Use(place, around))
                    if tensor.placements == passed[place].placements:
                        self._of(tensor).partial_from = dict(before.partial_from)

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._running.pop()
            self._passed.pop()
            parts = output if isinstance(output, (tuple, list)) else [output]
            for index, part in enumerate(parts):
                if _has_gradient(part):
                    place, shared = Place(path, HookPoint.FORWARD, index), self._of(part)
                    shared.places.append(place)
                    for axis, placement in enumerate(part.placements):
                        if placement.is_partial() and axis not in shared.partial_from:
                            shared.partial_from[axis], self._outputs[place] = place, part
            if not path:  # the script gets what the model returns
                for leaf in pytree.tree_leaves(dict(output) if _is_mapping(output) else output):
                    if _has_gradient(leaf):
                        self._of(leaf).uses.append(Use(None, ""))

        return hook


def _inputs(
    path: str, positional: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Inputs:
    named = {positional.index(key) if key in positional else key: kwargs[key] for key in kwargs}
    return {
        Place(path, HookPoint.FORWARD_PRE, index): value
        for index, value in [*enumerate(args), *named.items()]
        if _has_gradient(value)
    }


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _has_gradient(value: Any) -> TypeGuard[DTensor]:
    return isinstance(value, DTensor) and value.requires_grad
