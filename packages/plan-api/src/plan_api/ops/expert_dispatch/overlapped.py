"""Runs a module while tokens are sent that its caller calls behind the experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from plan_api.runtime.hooks import register_always_called

__all__ = ["OverlappedModule"]


class OverlappedModule:
    """A module that runs earlier than its caller calls it, on the first input of its caller.

    Args:
        caller: the module that calls it, and before it the experts.
        name: of the module in its caller.
        path: of the caller, for messages.
    """

    def __init__(self, caller: nn.Module, name: str, path: str) -> None:
        self._caller, self._name, self._path = caller, name, path
        self._input: Any = None

    def install(self) -> list[RemovableHandle]:
        """Installs hooks of the caller, behind those that redistribute its inputs."""
        return [
            self._caller.register_forward_pre_hook(self._remember, with_kwargs=True),
            register_always_called(self._caller, self._restore, prepend=True),
        ]

    def run(self) -> None:
        """Runs the module; the caller's call of it returns the output."""
        given, name = self._input, self._name
        if given is None:  # the experts are called by another module
            return
        output = getattr(self._caller, name)(given)

        def returned(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != 1 or args[0] is not given:
                raise ValueError(
                    f"{self._error} calls it with something else than its own first input; "
                    f"leave {name!r} out of dispatch(overlap=)"
                )
            # Attribute lookup finds this function before the module.
            del vars(self._caller)[name]
            return output

        vars(self._caller)[name] = returned

    @property
    def _error(self) -> str:
        return f"{self._path or 'the model'} runs {self._name} while tokens are dispatched, but"

    def _remember(self, caller: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next(iter((*args, *kwargs.values())), None)
        self._input = given if isinstance(given, torch.Tensor) else None

    def _restore(self, caller: nn.Module, _: Any, output: Any) -> None:
        self._input = None
        if vars(caller).pop(self._name, None) is not None and output is not None:
            raise ValueError(
                f"{self._error} does not call it behind the experts; leave {self._name!r} out of "
                f"dispatch(overlap=)"
            )
