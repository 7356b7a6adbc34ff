"""Installs sites as forward hooks of modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import HookPoint, Site
from plan_api.lowering.model_names import argument_slot, is_inside, positional_names
from plan_api.runtime.containers import map_tensors, replace_part
from plan_api.runtime.error_context import append_site

__all__ = [
    "SiteCoverage", "TensorTransform", "get_argument", "install_site_hook", "is_validating",
    "register_always_called", "replace_argument", "validating",
]  # fmt: skip

_validations = 0  # that are running


@contextmanager
def validating() -> Iterator[None]:
    """Marks the calls of models inside of the block as made to validate them."""
    global _validations
    _validations += 1
    try:
        yield
    finally:
        _validations -= 1


def is_validating() -> bool:
    """Whether a model is running to be validated, as `Installed.check` and ``guard_steps`` do.

    Hooks that count what a model does leave such calls out, which train nothing.
    """
    return _validations > 0


def register_always_called(
    module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False
) -> RemovableHandle:
    """Registers a forward hook that is called if forward raises, too.

    Its id is the same in all modules that have as many: graphs of torch.compile are guarded by the
    ids of such hooks, and layers that are alike would be compiled one by one.

    Args:
        module: any.
        hook: as `nn.Module.register_forward_hook` takes it.
        prepend: whether it runs before the hooks that are there.
    """
    handle = module.register_forward_hook(hook, prepend=prepend, always_call=True)
    # torch counts ids from 0 on.
    fixed = next(one for one in itertools.count(-1, -1) if one not in module._forward_hooks)
    registries: tuple[dict[int, Any], ...] = (
        module._forward_hooks, module._forward_hooks_always_called,
    )  # fmt: skip
    for hooks in registries:
        hooks[fixed] = hooks.pop(handle.id)
    if prepend:
        module._forward_hooks.move_to_end(fixed, last=False)  # type: ignore[attr-defined]
    handle.id = fixed
    return handle


class SiteCoverage:
    """Records which sites have run since `parallelize`."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._unused = {(site.path, site.hook_point): site for site in sites}

    def record(self, site: Site) -> None:
        """Records that a site has run."""
        self._unused.pop((site.path, site.hook_point), None)

    def record_inside(self, path: str) -> None:
        """Records that all sites of a module, and of modules inside it, have run.

        For compiled modules, whose hooks run only where a graph is traced, which several share.
        """
        for site in self.unused_sites:
            if is_inside(site.path, path):
                self.record(site)

    def first_run(self, site: Site) -> Callable[[], None]:
        """Returns what a site's hook calls to record it.

        torch.compile calls it while it traces, as it would otherwise guard on whether the hook has
        run, and compile each graph again in the second step.
        """

        def record() -> None:
            self.record(site)

        traced: Callable[[], None] = torch.compiler.assume_constant_result(record)
        return traced

    @property
    def unused_sites(self) -> list[Site]:
        """The sites that have not run."""
        return list(self._unused.values())


class TensorTransform(Protocol):
    """What a hook applies to each tensor of an argument or a result."""

    # The last spec of a DTensor that was returned unchanged. Torch gives the same object to the
    # same operator's result again, so hooks compare it first.
    settled: DTensorSpec | None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the transformed tensor, or the same object if nothing changes."""


def install_site_hook(
    site: Site,
    module: nn.Module,
    transforms: Sequence[tuple[int | str, TensorTransform]],
    coverage: SiteCoverage,
) -> RemovableHandle:
    """Registers one hook that applies all steps of a site.

    Args:
        site: on inputs or outputs.
        module: the site's.
        transforms: of the site's steps, each with the number or name of its argument or result.
        coverage: records the first run of the hook.
    """
    if site.hook_point is HookPoint.FORWARD_PRE:
        positional = positional_names(module)
        arguments = [
            (*argument_slot(index, positional), transform) for index, transform in transforms
        ]
        hook = _pre_hook(site, arguments, coverage)
        return module.register_forward_pre_hook(hook, with_kwargs=True)
    return module.register_forward_hook(_post_hook(site, transforms, coverage))


# The position and the name of an argument, which may be passed by either, and its transform: plain
# tuples, which a loop unpacks fastest.
_Argument: TypeAlias = tuple[int, str, TensorTransform]


def get_argument(slot: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the argument at a position or of a name; None if it was not passed."""
    position, name = slot
    return args[position] if position < len(args) else kwargs.get(name)


def replace_argument(
    slot: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with another value at a position or of a name, if one was passed."""
    position, name = slot
    if position < len(args):
        return (*args[:position], value, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: value} if name in kwargs else kwargs


def _pre_hook(
    site: Site, arguments: Sequence[_Argument], coverage: SiteCoverage
) -> Callable[..., Any]:
    seen, record = False, coverage.first_run(site)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal seen
        tracing = torch.compiler.is_dynamo_compiling()
        if tracing:
            record()
        elif not seen:
            seen = True
            record()
        changed = False
        for position, name, transform in arguments:
            if position < len(args):
                old = args[position]
            elif name in kwargs:
                old = kwargs[name]
            else:
                continue
            if not tracing and type(old) is DTensor and old._spec is transform.settled:
                continue
            try:
                is_plain = type(old) is torch.Tensor
                new = transform(old) if is_plain else map_tensors(old, transform)
            except Exception as error:
                append_site(error, site, (position, name), old)
                raise
            if new is old:
                continue
            changed = True
            if position < len(args):
                args = (*args[:position], new, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: new}
        return (args, kwargs) if changed else None

    return hook


def _post_hook(
    site: Site, transforms: Sequence[tuple[int | str, TensorTransform]], coverage: SiteCoverage
) -> Callable[..., Any]:
    seen, record = False, coverage.first_run(site)

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        nonlocal seen
        tracing = torch.compiler.is_dynamo_compiling()
        if tracing:
            record()
        elif not seen:
            seen = True
            record()
        changed = output
        for index, transform in transforms:
            is_first = index == 0 and not tracing
            if type(changed) is DTensor and is_first and changed._spec is transform.settled:
                continue
            try:
                changed = replace_part(changed, index, transform, site)
            except Exception as error:
                append_site(error, site, (index,), changed)
                raise
        return changed

    return hook
