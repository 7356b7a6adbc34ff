"""Which sites a call of the model passes: a set that no check has validated is an error."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from plan_api.lowering.model_names import is_inside
from plan_api.static.comparison import StaticError

__all__ = ["CallCoverage"]


class CallCoverage:
    """The tensors that sites of one model redistribute, call by call.

    Compiled code adds nothing to it, in any call.
    """

    def __init__(self) -> None:
        self._current: set[str] = set()
        self._validated: list[frozenset[str]] = []

    def begin_call(self) -> None:
        """Starts an empty set, for the next call of the model."""
        self._current.clear()

    def add(self, tensor: str) -> None:
        """Adds a tensor that a site has redistributed."""
        if not torch.compiler.is_dynamo_compiling():
            self._current.add(tensor)

    def mark_validated(self) -> None:
        """Records that the sites of this call computed what Eager does."""
        self._validated.append(frozenset(self._current))

    def check(self, compiled_modules: Callable[[], Collection[str]]) -> None:
        """Checks that a call with these sites has been validated.

        Args:
            compiled_modules: returns the paths of modules whose sites compiled code passes.

        Raises:
            StaticError: calls have been validated, and none of them passed these sites; names the
                sites that differ.
        """
        if not self._validated or self._current in self._validated:
            return
        compiled = compiled_modules()
        current = _outside(compiled, self._current)
        if any(current == _outside(compiled, sites) for sites in self._validated):
            self._validated.append(frozenset(self._current))
            return
        first = self._validated[0]
        changed = [
            f"{', '.join(sorted(sites))} {how}"
            for sites, how in (
                (first - self._current, "missing"), (self._current - first, "additional"),
            )
            if sites
        ]  # fmt: skip
        site = _module(min(first ^ self._current))
        raise StaticError(
            f"this call of the model passed other sites of the plan than the first one: "
            f"{'; '.join(changed)}. Its control flow has changed, and the plan may not fit it any "
            f"more: call installed(model).check(batch), which validates this control flow against "
            f"Eager and allows it from then on; guard_steps=0 disables the check",
            site,
        )


def _outside(modules: Collection[str], sites: Collection[str]) -> set[str]:
    """Returns the tensors of sites that are in none of these modules."""
    return {one for one in sites if not any(is_inside(_module(one), path) for path in modules)}


def _module(tensor: str) -> str:
    return tensor.partition(":")[0].rpartition(".")[0]
