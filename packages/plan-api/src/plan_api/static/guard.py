"""Validates static mode against Eager before it trains: a wrong plan has no other symptom."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from plan_api.eager import install_eager
from plan_api.lowering.ir import Lowered, OpKind
from plan_api.runtime.agreement import first_site_on_any_rank, true_on_all_ranks, true_on_any_rank
from plan_api.runtime.hooks import SiteCoverage, validating
from plan_api.static.comparison import Difference, StaticError, compare_modes
from plan_api.static.coverage import CallCoverage
from plan_api.static.fully_shard import FullyShardedParams
from plan_api.static.gradients import LocalParamGradients
from plan_api.static.local_params import LocalParam
from plan_api.static.shadow_model import ReplicatedUnits, is_compiled, is_fake, shadow_of

__all__ = ["Guard"]

_log = logging.getLogger("plan_api")

_NONZERO = 2.0**-5


class Guard:
    """Compares a model in static mode with Eager on the same inputs.

    Args:
        model: the model, in static mode.
        lowered: its plan, lowered.
        mesh: the plan's mesh.
        local_params: the model's local parameters.
        gradients: what makes their gradients DTensors.
        fully_sharded: the parameters that fully_shard gathers.
        call_coverage: the sites that a call passes.
        steps: how many of the next calls with gradients are compared before they run.
        overlap: the axis along which communication is split to overlap with products, so that
            collectives along it are not compared; None: all are.
    """

    def __init__(
        self,
        model: nn.Module,
        lowered: Lowered,
        mesh: DeviceMesh,
        local_params: Sequence[LocalParam],
        gradients: LocalParamGradients,
        fully_sharded: FullyShardedParams,
        call_coverage: CallCoverage,
        steps: int,
        *,
        overlap: str | None = None,
    ) -> None:
        self._lowered, self._mesh = lowered, mesh
        self._local_params, self._gradients = local_params, gradients
        self._fully_sharded = fully_sharded
        self._call_coverage, self._remaining_steps, self._checking = call_coverage, steps, False
        self._units = ReplicatedUnits(lowered.uneven_units)
        self._overlap = overlap
        self._model = weakref.ref(model)
        self.handles: tuple[RemovableHandle, ...] = (
            model.register_forward_pre_hook(self._before_call, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after_call),
        )

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Difference, ...]:
        """Runs the model in both modes, forward and backward, and leaves it unchanged.

        All ranks of the mesh call it. It takes a step of Eager, and the memory of all modules'
        outputs; with fully_shard also that of all unsharded parameters.

        Args:
            args: the model's positional arguments.
            kwargs: the model's keyword arguments.

        Returns:
            differences on this rank that are rounding only, as they arise where a dim is 1 on a
            rank and torch chooses other strides; and collectives that differ in kind, number or
            bytes.

        Raises:
            StaticError: on every rank, if on any of them static mode computes something else than
                Eager; names the site and the difference.
        """
        remaining, self._remaining_steps, self._checking = self._remaining_steps, 0, True
        model = self._model()
        assert model is not None
        failed: StaticError | None = None
        differences: list[Difference] = []
        try:
            zeros = self._zero_params()
            with validating(), _filled(zeros), self._fully_sharded.unsharded(model):
                differences = self._compare_with_eager(model, args, kwargs)
        except StaticError as error:
            if not all(is_fake(one.tensor) for one in self._local_params):
                raise  # what other ranks send no one receives
            failed = error
        finally:
            self._remaining_steps, self._checking = remaining, False
        wrong = [difference for difference in differences if difference.is_wrong]
        if true_on_any_rank(bool(wrong or failed), self._mesh):
            own = failed.site if failed is not None else wrong[0].site if wrong else ""
            site = first_site_on_any_rank(own, self._mesh)
            if failed is not None:
                raise failed
            lines = "\n".join(map(str, wrong[:5])) or "no difference on this rank, but on another"
            raise StaticError(
                f"static mode does not compute what Eager does; differences in the order in which "
                f"they arose:\n{lines}\nadd to the plan how the tensors there are placed, or use "
                f"mode='eager'",
                site,
            )
        self._call_coverage.mark_validated()
        self._call_coverage.begin_call()  # the validated call itself follows
        return tuple(differences)

    def _zero_params(self) -> list[torch.Tensor]:
        """Returns the local tensors of parameters that are zero everywhere."""
        tensors = [
            local_param.tensor
            for local_param in self._local_params
            if isinstance(local_param.param, nn.Parameter)
            and local_param.tensor.is_floating_point()
            and not is_fake(local_param.tensor)
        ]
        are_zero = [not tensor.any() for tensor in tensors]
        if tensors and any(schedule.has_phases for schedule in self._lowered.schedules.values()):
            # All ranks gather a parameter again if it has changed, so it changes on all or none.
            are_zero = true_on_all_ranks(are_zero, self._mesh)
        return [tensor for tensor, is_zero in zip(tensors, are_zero, strict=True) if is_zero]

    def _compare_with_eager(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Difference]:
        """Compares the modes, while no parameter is sharded by fully_shard."""
        unsharded = self._fully_sharded.as_dtensors(model)

        def as_dtensor(tensor: torch.Tensor) -> torch.Tensor:
            param = unsharded.get(id(tensor))
            return self._units.tensor(self._as_dtensor(tensor) if param is None else param)

        shadow = shadow_of(model, as_dtensor)
        sites, indices = self._lowered.sites, self._lowered.indices
        schedules = self._units.schedules(self._lowered.schedules)
        handles = [
            *install_eager(
                shadow, sites, schedules, indices, self._mesh, SiteCoverage([]),
                self._units.redistribution,
            )
        ]  # fmt: skip
        handles += self._fully_sharded.install_casts(shadow)
        local_params = {**self._gradients.by_name(), **self._fully_sharded.gradients(model)}
        try:
            differences = compare_modes(
                shadow, model, local_params, self._mesh, args, kwargs, self._units.is_replicated,
                has_local_regions=any(op.kind is OpKind.LOCAL for op in self._lowered.ops),
                ignored_axis=self._overlap,
            )  # fmt: skip
        finally:
            for handle in handles:
                handle.remove()
        if self._units.exist:
            # Eager replicates what static mode shards: it sends less, and sums in another order.
            return [one for one in differences if one.is_wrong]
        return differences

    def _before_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._remaining_steps or not torch.is_grad_enabled():
            return
        self._remaining_steps -= 1
        differences = self.check(args, kwargs)
        rounding = [one for one in differences if one.only_rounding]
        collectives = [one for one in differences if one.only_collectives]
        if rounding:
            _log.warning(
                "static mode equals Eager up to rounding, not bit for bit: %s", rounding[0]
            )
        if collectives:
            _log.warning(
                "static mode communicates otherwise than Eager, with the same result; "
                "plan_communication or generate_static plan both alike:\n%s",
                "\n".join(map(str, collectives)),
            )

    def _after_call(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._checking:
            self._call_coverage.check(self._compiled_modules)

    def _compiled_modules(self) -> list[str]:
        model = self._model()
        assert model is not None
        return [name for name, module in model.named_modules() if is_compiled(module)]

    def _as_dtensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        replicate = [Replicate()] * self._mesh.ndim
        return DTensor.from_local(tensor, self._mesh, replicate, run_check=False)


@contextmanager
def _filled(zeros: Sequence[torch.Tensor]) -> Iterator[None]:
    """Fills tensors that are zero with another number inside of the block.

    A gate that is zero hides what it multiplies, and a bias that is zero how often it is added.
    """
    with torch.no_grad():
        for tensor in zeros:
            tensor.fill_(_NONZERO)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor in zeros:
                tensor.zero_()
