"""Installs communication beside products, where `plan_api.lowering.overlap` has found it.

The hook of a site in front of Linears gathers and multiplies at once, and returns the gathered
input; each Linear then returns its output if it gets this very tensor. Behind a Linear it is the
other way round: the Linear multiplies and sums at once, and the hook returns the sum if it gets
this very product. So a module that does something else with the tensors gets what it would get
unsplit: only what was computed too early is lost, which is logged, and not repeated.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import HookPoint, Site, SiteStep
from plan_api.lowering.overlap import Overlap
from plan_api.ops.overlap.fused import FusedOperators, fused_operators
from plan_api.ops.overlap.products import (
    GatheredProducts,
    PartialProduct,
    Placing,
    ReducedProduct,
)
from plan_api.ops.overlap.rows_in_flight import ArrivingRows, RowsInFlight
from plan_api.ops.overlap.transfer import Peers
from plan_api.runtime.attribution import moving
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.hooks import TensorTransform, register_always_called
from plan_api.runtime.local_shards import ShardSizes
from plan_api.runtime.policies.replaced_forward import ReplacedForward
from plan_api.spec.axes import axis_names

__all__ = ["OverlappedSites"]

_log = logging.getLogger("plan_api")
_PLAIN = (torch.Tensor, nn.Parameter, RowsInFlight)
# Into how many blocks of rows a sum is split that stays replicated: a block is sent while the next
# one is computed.
_BLOCKS = 4
# If the last one arrives beside the products that follow, fewer ones are enough.
_BLOCKS_IN_FLIGHT = 2


class OverlappedSites:
    """The sites of a model that communicate beside products.

    Args:
        overlaps: of the plan; those without Linears are left out.
        model: any; it is changed by `install`.
        mesh: of the plan.
        sizes: knows the sizes of shards in static mode; None in Eager, where DTensors do.
    """

    def __init__(
        self,
        overlaps: Sequence[Overlap],
        model: nn.Module,
        mesh: DeviceMesh,
        sizes: ShardSizes | None = None,
    ) -> None:
        self._model = model
        used = [one for one in overlaps if one.linears]
        takes_rows = any(one.is_input and not one.forward for one in used)
        self._in_flight = _InFlight() if takes_rows else None
        fused: FusedOperators | None = None
        if any(isinstance(move, Shard) for one in used for move in (one.move.src, one.move.dst)):
            fused = fused_operators(mesh.get_group(used[0].axis), mesh.device_type)
        context = _Context(mesh, sizes, fused, self._in_flight)
        self._regions: dict[tuple[str, HookPoint, int | str], _Region] = {
            (one.path, one.hook_point, one.step.index): (
                _InputRegion if one.is_input else _OutputRegion
            )(one, model, context)
            for one in used
        }

    def transform(self, site: Site, step: SiteStep, unsplit: TensorTransform) -> TensorTransform:
        """Returns the transform of a step: with its products, or else the unsplit one.

        Args:
            site: of the model.
            step: of the site.
            unsplit: redistributes a tensor as the plan says.
        """
        region = self._regions.get((site.path, site.hook_point, step.index))
        if region is None or step != region.overlap.step:
            return unsplit
        region.unsplit = unsplit
        return region

    def install(self) -> Iterator[RemovableHandle]:
        """Replaces the forwards of Linears; called when the hooks of sites are installed."""
        for region in self._regions.values():
            for module in region.modules:
                yield ReplacedForward(module, region.forward)
            module = self._model.get_submodule(region.overlap.path)
            # Functions, as a copy of the model would copy the owner of a method.
            yield module.register_forward_hook(lambda *_, region=region: region.end())
            yield register_always_called(module, lambda *_, region=region: region.clear())
        if self._in_flight is not None:
            in_flight = self._in_flight
            yield self._model.register_forward_hook(
                lambda _, __, output: in_flight.arrived(output), prepend=True
            )
            yield register_always_called(self._model, lambda *_: in_flight.clear())


class _InFlight:
    """The last sum that a model has sent, which may be waited for later; one at a time."""

    def __init__(self) -> None:
        self._last: ArrivingRows | None = None

    def can_take(self) -> bool:
        """Whether operators are run on rows in flight, and not seen by a mode one by one."""
        return _get_current_dispatch_mode() is None and not torch.is_inference_mode_enabled()

    def begin(self, total: ArrivingRows) -> RowsInFlight:
        """Returns a sum that has been sent; that from before has arrived."""
        self.wait()
        self._last = total
        return RowsInFlight(total)

    def wait(self) -> None:
        """Waits for the last sum, and what is computed from it."""
        if self._last is not None:
            self._last.wait()
        self.clear()

    def arrived(self, output: Any) -> Any:
        """Returns what a model has returned, with plain tensors."""
        self.wait()
        return map_tensors(output, _arrived)

    def clear(self) -> None:
        """Forgets the sum of a call, which may have failed."""
        self._last = None


@dataclass(frozen=True)
class _Context:
    """What the sites of a model share.

    Attributes:
        mesh: of the plan.
        sizes: as of `OverlappedSites`.
        fused: multiply and communicate in one; None: rows are sent and received.
        in_flight: the last sum; None: no site takes one that has not arrived.
    """

    mesh: DeviceMesh
    sizes: ShardSizes | None
    fused: FusedOperators | None
    in_flight: _InFlight | None


class _Region(ABC):
    """A site, and the Linears beside it. It is the transform of the site's hook.

    Attributes:
        overlap: what is overlapped.
        modules: the Linears.
        unsplit: redistributes without products.
    """

    settled: DTensorSpec | None = None  # tensors are never returned unchanged
    unsplit: TensorTransform

    def __init__(self, overlap: Overlap, model: nn.Module, context: _Context) -> None:
        self.overlap, mesh = overlap, context.mesh
        self.modules: list[Any] = [model.get_submodule(name) for name in overlap.linears]
        self._mesh, self._sizes = mesh, context.sizes
        self._axis = axis_names(mesh).index(overlap.axis)
        move, step = overlap.move, overlap.step
        self._name = f"{overlap.path}.{overlap.hook_point.value}".lstrip(".")
        self._what = f"{self._name}:{step.tensor}:{step.index}"
        self._sharded = move.src if overlap.is_input else move.dst
        peers = Peers(
            mesh.get_group(self._axis),
            mesh.get_local_rank(self._axis),
            mesh.size(self._axis),
            f"plan-api: {self._what}, {step.description}",
        )
        dim = self._sharded.dim if isinstance(self._sharded, Shard) else None
        backward = StepContext(f"the backward of {self._name}", step)
        self._placing = Placing(peers, dim, backward, context.fused)
        self._reported = False

    @abstractmethod
    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the redistributed tensor."""

    @abstractmethod
    def forward(self, module: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces the forward of a Linear."""

    @abstractmethod
    def end(self) -> None:
        """Takes note of what was computed in vain, at the end of a call of the site's module."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets the tensors of a call, which may have failed."""

    def _moving(self) -> AbstractContextManager[None]:
        move = self.overlap.move
        assert move.src is not None
        return moving(self.overlap.step, (move.src,), (move.dst,))

    def _splits(self, tensor: torch.Tensor, modules: Sequence[Any], whole: Placement) -> bool:
        """Whether the communication of a tensor is split, which is so on all ranks or on none.

        Args:
            tensor: goes into the Linears, or is the site's input.
            modules: the Linears.
            whole: the placement along the axis that the tensor should have.
        """
        if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
            return False
        reason = self._reason(tensor, modules, whole)
        if reason and not self._reported:
            self._reported = True
            _log.warning(
                "overlap=%r: %s communicates without a product beside it: %s",
                self.overlap.axis, self._name, reason,
            )  # fmt: skip
        return not reason

    def _reason(self, tensor: torch.Tensor, modules: Sequence[Any], whole: Placement) -> str:
        params = [one for module in modules for one in _params(module) if one is not None]
        if self._sizes is not None:
            if any(type(one) not in _PLAIN for one in (tensor, *params)):
                return "a parameter or the input is no plain tensor"
        elif any(type(one) is not DTensor for one in (tensor, *params)):
            return "a parameter or the input is no DTensor"
        elif any(not self._is_placed(one) for one in params):
            return "a parameter is sharded along several axes"
        elif tensor.placements[self._axis] != whole or any(  # type: ignore[attr-defined]
            not isinstance(placement, (Shard, Replicate)) or placement.is_shard(tensor.ndim - 1)
            for axis, placement in enumerate(tensor.placements)  # type: ignore[attr-defined]
            if axis != self._axis
        ):
            return f"a tensor is placed {tensor.placements}"  # type: ignore[attr-defined]
        dim = self._placing.dim
        if tensor.ndim < 2 or (dim is not None and dim >= tensor.ndim - 1):
            return f"a tensor of {tensor.ndim} dims has no rows to split along {self._sharded}"
        if dim is not None and not self._is_even(tensor, dim):
            return f"dim {dim} is not a multiple of {self._placing.peers.size}"
        return ""

    def _is_placed(self, param: Any) -> bool:
        """Whether a DTensor is sharded along the axis of the site only, or not at all."""
        return all(
            axis == self._axis or placement.is_replicate()
            for axis, placement in enumerate(param.placements)
        )

    def _is_even(self, tensor: torch.Tensor, dim: int) -> bool:
        if self._sizes is not None and self.overlap.is_input:
            return self._sizes.length(self._what, self._axis, dim, tensor) is None
        return tensor.shape[dim] % self._placing.peers.size == 0

    def _local_params(self, module: Any, tensor: torch.Tensor) -> list[torch.Tensor | None]:
        """Returns a Linear's weight and bias, which multiply a tensor, as local tensors."""
        if not isinstance(tensor, DTensor):
            return _params(module)
        # A rank of an axis that shards rows has a part of the gradient of each parameter.
        part = [
            Partial() if isinstance(placement, Shard) else Replicate()
            for placement in tensor.placements
        ]
        return [
            None
            if one is None
            else one.to_local(grad_placements=self._along(part, one.placements[self._axis]))
            for one in _params(module)
        ]

    def _along(self, placements: Sequence[Placement], placement: Placement) -> list[Placement]:
        """Returns placements with another one along the axis of the site."""
        return [*placements[: self._axis], placement, *placements[self._axis + 1 :]]


class _InputRegion(_Region):
    """A site in front of Linears, whose outputs it computes."""

    def __init__(self, overlap: Overlap, model: nn.Module, context: _Context) -> None:
        super().__init__(overlap, model, context)
        self._whole: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}  # by the id of the module
        self._unused: set[int] = set()  # numbers of modules

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the gathered tensor, and computes the outputs of the Linears."""
        before = self.overlap.move.src
        assert before is not None
        if not self._splits(tensor, self.modules, before):
            return self.unsplit(tensor)
        if self._sizes is not None:
            self.unsplit.record()  # type: ignore[attr-defined]
        local = tensor
        if isinstance(tensor, DTensor):
            local = tensor.to_local(grad_placements=tensor.placements)
        features = tensor.shape[-1]
        unused = {
            number
            for number, module in enumerate(self.modules)
            if number in self._unused or module.weight.shape[1] != features
        }
        params = [one for module in self.modules for one in self._local_params(module, tensor)]
        with self._moving():
            whole, *outputs = GatheredProducts.apply(local, self._placing, unused, *params)  # type: ignore[no-untyped-call]
        if isinstance(tensor, DTensor):
            placements = self._along(tensor.placements, Replicate())
            whole = _WholeInput.apply(whole, self._mesh, placements, self._axis)  # type: ignore[no-untyped-call]
            of_output = self._along(tensor.placements, Shard(tensor.ndim - 1))
            outputs = [one if one is None else self._as_dtensor(one, of_output) for one in outputs]
        self._whole = whole
        self._outputs = {
            id(module): output
            for module, output in zip(self.modules, outputs, strict=True)
            if output is not None
        }
        return self._whole

    def forward(self, module: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the output that the hook has computed, if this is the gathered input."""
        if tensor is self._whole and id(module) in self._outputs:
            return self._outputs.pop(id(module))
        return type(module).forward(module, tensor)  # type: ignore[no-any-return]

    def end(self) -> None:
        """Leaves Linears out of the next call that did not take the gathered input."""
        for number, one in enumerate(self.modules):
            if id(one) in self._outputs and number not in self._unused:
                self._unused.add(number)
                _log.warning(
                    "overlap=%r: %s does not multiply the input of %s, so nothing is sent beside "
                    "its product",
                    self.overlap.axis, self.overlap.linears[number], self._name,
                )  # fmt: skip

    def clear(self) -> None:
        """Forgets the tensors of a call."""
        self._whole, self._outputs = None, {}

    def _as_dtensor(self, tensor: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
        return DTensor.from_local(tensor, self._mesh, placements, run_check=False)


class _OutputRegion(_Region):
    """A site behind a Linear, which computes what the site returns."""

    def __init__(self, overlap: Overlap, model: nn.Module, context: _Context) -> None:
        super().__init__(overlap, model, context)
        # Of the model itself nothing follows.
        self._in_flight = context.in_flight if overlap.path else None
        self._part: torch.Tensor | None = None  # as the Linear returned it
        self._local_part: torch.Tensor | None = None
        self._sums: list[torch.Tensor | ArrivingRows] = []
        self._is_unused = False

    def forward(self, module: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the product of a Linear, and sums it over ranks beside."""
        if module is not self.modules[0] or not self._splits(
            tensor, self.modules, Shard(tensor.ndim - 1)
        ):
            return type(module).forward(module, tensor)  # type: ignore[no-any-return]
        local = tensor
        if isinstance(tensor, DTensor):
            local = tensor.to_local(grad_placements=tensor.placements)
        self._sums = []
        sums = None if self._is_unused else self._sums
        params = self._local_params(module, tensor)
        with self._moving():
            blocks = _BLOCKS if self._takes_flight() is None else _BLOCKS_IN_FLIGHT
            part = PartialProduct.apply(local, self._placing, sums, *params, blocks)  # type: ignore[no-untyped-call]
        self._local_part = self._part = part
        if isinstance(tensor, DTensor):
            placements = self._along(tensor.placements, Partial())
            self._part = DTensor.from_local(part, self._mesh, placements, run_check=False)
        assert self._part is not None
        return self._part

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum that the Linear has computed, if this is its product."""
        part = self._local_part
        if tensor is not self._part or part is None or not self._sums:
            return self.unsplit(tensor)
        if self._sizes is not None:
            self.unsplit.record()  # type: ignore[attr-defined]
        product = part.grad_fn if torch.is_grad_enabled() else None
        total = ReducedProduct.apply(part, self._placing, [self._sum()], product)  # type: ignore[no-untyped-call]
        self._part = self._local_part = None
        self._sums = []
        if isinstance(tensor, DTensor):
            placements = self._along(tensor.placements, self.overlap.move.dst)
            total = DTensor.from_local(total, self._mesh, placements, run_check=False)
        return total  # type: ignore[no-any-return]

    def _takes_flight(self) -> _InFlight | None:
        in_flight = self._in_flight
        return in_flight if in_flight is not None and in_flight.can_take() else None

    def _sum(self) -> torch.Tensor:
        """Returns the sum, which may be in flight."""
        (total,) = self._sums
        if isinstance(total, torch.Tensor):
            return total
        in_flight = self._takes_flight()
        if in_flight is not None:
            return in_flight.begin(total)
        total.wait()
        return total.tensors[0]

    def end(self) -> None:
        """Leaves the sum out of the next call if the module did not return the product."""
        for one in self._sums:
            if isinstance(one, ArrivingRows):
                one.wait()
        if self._sums and not self._is_unused:
            self._is_unused = True
            _log.warning(
                "overlap=%r: %s does not return the product of %s, so nothing is sent beside it",
                self.overlap.axis, self.overlap.path or "the model", self.overlap.linears[0],
            )  # fmt: skip

    def clear(self) -> None:
        """Forgets the tensors of a call."""
        self._part = self._local_part = None
        self._sums = []


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        if isinstance(tensor._local_tensor, RowsInFlight):
            tensor._local_tensor = tensor._local_tensor.whole()
        return tensor
    return _Arrived.apply(tensor) if isinstance(tensor, RowsInFlight) else tensor  # type: ignore[no-untyped-call]


class _Arrived(torch.autograd.Function):
    """Returns a plain tensor for `RowsInFlight`."""

    @staticmethod
    def forward(ctx: Any, rows: RowsInFlight) -> torch.Tensor:
        return rows.whole().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads


class _WholeInput(torch.autograd.Function):
    """Makes a gathered input a DTensor; its gradient is the local part of a sum over ranks."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], axis: int
    ) -> DTensor:
        ctx.placements, ctx.axis, ctx.size = placements, axis, mesh.size(axis)
        return DTensor.from_local(local, mesh, placements, run_check=False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,) = grads
        placements, is_sum = [*ctx.placements], grad.placements[ctx.axis].is_partial()
        if is_sum:
            placements[ctx.axis] = Partial()
        local = grad.redistribute(placements=placements).to_local()
        return local if is_sum else local / ctx.size, None, None, None


def _params(module: Any) -> list[Any]:
    return [module.weight, module.bias]
