"""Static mode is held against Eager before it trains: nothing else tells that it goes wrong."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from plan_api.eager import install_eager
from plan_api.lowering.ir import Lowered
from plan_api.runtime.agreement import first_site_on_any_rank, true_on_any_rank
from plan_api.runtime.hooks import SiteCoverage
from plan_api.static.compare import Difference, StaticError, compare
from plan_api.static.fake import is_fake
from plan_api.static.gradients import LeafGradients
from plan_api.static.leaves import Leaf
from plan_api.static.passed import Passed
from plan_api.static.twin import twin_of

__all__ = ["Guard"]

_log = logging.getLogger("plan_api")

_NOT_ZERO = 2.0**-5


class Guard:
    """Compares a model in static mode with what Eager makes of the same inputs.

    Args:
        model: in static mode.
        lowered: its plan.
        mesh: the plan's.
        leaves: what modules use of its parameters.
        gradients: of these.
        passed: is told which sites it passes.
        steps: so many calls of the model with gradients are compared before they run.
    """

    def __init__(
        self,
        model: nn.Module,
        lowered: Lowered,
        mesh: DeviceMesh,
        leaves: Sequence[Leaf],
        gradients: LeafGradients,
        passed: Passed,
        steps: int,
    ) -> None:
        self._lowered, self._mesh = lowered, mesh
        self._leaves, self._gradients, self._left = leaves, gradients, steps
        self._passed, self._checking = passed, False
        self._model = weakref.ref(model)
        self.handles: tuple[RemovableHandle, ...] = (
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after),
        )

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Difference, ...]:
        """Runs the model in both modes, forward and backward; changes nothing.

        All ranks of the mesh call. It takes a step of Eager, and the memory of what modules return.

        Args:
            args: of the model.
            kwargs: of the model.

        Returns:
            where only bits differ on this rank, as they do where a dim is 1 on a rank and torch
            lays it out otherwise.

        Raises:
            StaticError: on every rank, if on any static mode does something else than Eager; names
                the site, and what differs.
        """
        left, self._left, self._checking = self._left, 0, True
        model = self._model()
        assert model is not None
        try:
            eager = twin_of(model, self._as_dtensor)
            sites, indices = self._lowered.sites, self._lowered.indices
            handles = [*install_eager(eager, sites, {}, indices, self._mesh, SiteCoverage([]))]
            of_param = {leaf.name: self._gradients.of(leaf) for leaf in self._leaves}
            with _nowhere_zero(self._leaves):
                found = compare(eager, model, of_param, args, kwargs)
            for handle in handles:
                handle.remove()
        finally:
            self._left, self._checking = left, False
        wrong = [one for one in found if not one.bits]
        if true_on_any_rank(bool(wrong), self._mesh):
            told = "\n".join(map(str, wrong[:5])) or "this rank is right, another is not"
            raise StaticError(
                f"static mode does not compute what Eager does; in the order in which it went "
                f"wrong:\n{told}\nsay in the plan how the tensors that meet there are placed, or "
                f"use mode='eager'",
                first_site_on_any_rank(wrong[0].site if wrong else "", self._mesh),
            )
        self._passed.confirm()
        self._passed.begin()  # the call that is checked is to come
        return tuple(found)

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._left or not torch.is_grad_enabled():
            return
        self._left -= 1
        found = self.check(args, kwargs)
        if found:
            _log.warning("static mode is Eager up to rounding, and not bit for bit: %s", found[0])

    def _after(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._checking:
            self._passed.check()

    def _as_dtensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        whole = [Replicate()] * self._mesh.ndim
        return DTensor.from_local(tensor, self._mesh, whole, run_check=False)


@contextmanager
def _nowhere_zero(leaves: Iterable[Leaf]) -> Iterator[None]:
    """Within it no parameter is zero everywhere.

    Closed gates hide what they multiply, and biases that are zero how often they are added.
    """
    zeros = [
        leaf.tensor
        for leaf in leaves
        if isinstance(leaf.param, nn.Parameter)
        and leaf.tensor.is_floating_point()
        and not is_fake(leaf.tensor)
        and not leaf.tensor.any()
    ]
    with torch.no_grad():
        for tensor in zeros:
            tensor.fill_(_NOT_ZERO)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor in zeros:
                tensor.zero_()
