"""Which sites a call of the model passes: another set than Eager has confirmed is another plan."""

from __future__ import annotations

import torch

from plan_api.static.compare import StaticError

__all__ = ["Passed"]


class Passed:
    """The tensors that sites of one model move, call by call.

    What is compiled tells nothing, in any call.
    """

    def __init__(self) -> None:
        self._now: set[str] = set()
        self._confirmed: list[frozenset[str]] = []

    def begin(self) -> None:
        """A call of the model begins."""
        self._now.clear()

    def add(self, what: str) -> None:
        """A site's tensor was moved."""
        if not torch.compiler.is_compiling():
            self._now.add(what)

    def confirm(self) -> None:
        """What this call has passed was right."""
        self._confirmed.append(frozenset(self._now))

    def check(self) -> None:
        """Looks whether a call that has passed the same was right.

        Raises:
            StaticError: calls were right, and none of them passed the same; names the sites.
        """
        if not self._confirmed or self._now in self._confirmed:
            return
        known = self._confirmed[0]
        changed = [
            f"{', '.join(sorted(sites))} {how}"
            for sites, how in ((known - self._now, "not"), (self._now - known, "too"))
            if sites
        ]
        site = min(known ^ self._now).partition(":")[0].rpartition(".")[0]
        raise StaticError(
            f"this call of the model has passed other sites of the plan than the first one: "
            f"{'; '.join(changed)}. Its control flow has changed, and with it what the plan has to "
            f"say: installed(model).check(batch) holds it against Eager, and is enough to go on if "
            f"both agree; guard_steps=0 leaves all of that out",
            site,
        )
