"""The types of spmd_types that a plan gives to the local tensors of static mode.

Note: along each axis of the mesh a type says how the values of the ranks belong together, and so do
their gradients (spmd_types, docs/local_spmd_types.md):

    ==========  ==================  ====
    placement   of the gradient     type
    ==========  ==================  ====
    Replicate   Replicate           I
    Replicate   Partial             R
    Shard       Shard               V
    Partial     Replicate           P
    ==========  ==================  ====

A redistribution begins with the types of the first two of its placements and ends with those of the
last two: Replicate to Replicate with ``grad_src=Partial()`` is I to R, whose backward is an
all-reduce. Operators then propagate the types, and refuse those that they cannot mix.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from plan_api.lowering.ir import HookPoint, OpKind, Site, SiteStep
from plan_api.ops.function_calls import TorchFunction
from plan_api.ops.redistribute import apply_redistribution
from plan_api.runtime.hooks import TensorTransform
from plan_api.spec.axes import axis_names
from plan_api.spec.placements import format_placement
from plan_api.static.redistribute import StaticRedistribution

__all__ = ["PlanTypes", "TypedOperators"]

_LOSSES = (
    "cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "nll_loss",
)  # fmt: skip
# Their results are placed as their first tensor.
_PLACED_AS_INPUT = ("dropout", "scaled_dot_product_attention", "batch_norm", "group_norm")
_MEANS = {inspect.unwrap(getattr(F, name)) for name in _LOSSES}


class PlanTypes:
    """Types tensors where a plan places them, and checks them there.

    Args:
        spmd: the module spmd_types.
        mesh: of the plan.

    Attributes:
        spmd: the module spmd_types.
        axes: by name, those of spmd_types.
        names: of parameters, by the id of their local tensor.
        outputs: the tensors that entries place as outputs of the model, each with its axes.
    """

    def __init__(self, spmd: Any, mesh: DeviceMesh) -> None:
        self.spmd = spmd
        self.names: dict[int, str] = {}
        self.outputs: list[tuple[torch.Tensor, Collection[str]]] = []
        # An axis of one rank has no types: there is nothing to mix up.
        self.axes: Mapping[str, Any] = {
            name: spmd.MeshAxis.of(mesh.get_group(at))
            for at, name in enumerate(axis_names(mesh))
            if mesh.size(at) > 1
        }

    def type_of(self, placement: Placement, gradient: Placement | None) -> Any:
        """Returns the type of a tensor along an axis; see the table above."""
        if isinstance(placement, Partial):
            return self.spmd.P
        if isinstance(placement, Replicate):
            return self.spmd.R if isinstance(gradient, Partial) else self.spmd.I
        return self.spmd.V

    def types_of(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Returns the types of a tensor by axis; without those that it lacks."""
        types = self.spmd.get_local_type(tensor)
        return {name: types[axis] for name, axis in self.axes.items() if axis in types}

    def assign(self, tensor: torch.Tensor, types: Mapping[str, Any]) -> torch.Tensor:
        """Types a tensor, by axis, and returns it.

        Along axes without a type it is replicated, and so is its gradient. R and I differ in their
        gradients only: a tensor without one is R, which operators mix with V as well.
        """
        spmd = self.spmd
        whole = spmd.I if tensor.requires_grad else spmd.R
        found = {axis: types.get(name, whole) for name, axis in self.axes.items()}
        if not tensor.requires_grad:
            found = {axis: spmd.R if one is spmd.I else one for axis, one in found.items()}
        spmd.assert_type(tensor, found)
        return tensor

    def described(self, tensor: torch.Tensor) -> str:
        """Returns a tensor's name or shape, and its types, for messages."""
        name = self.names.get(id(tensor), f"a tensor of {tuple(tensor.shape)}")
        types = ", ".join(f"{axis}={one.value}" for axis, one in self.types_of(tensor).items())
        return f"{name}, {types}"

    def redistributed(
        self, site: Site, step: SiteStep, transform: StaticRedistribution
    ) -> TensorTransform:
        """Returns a transform that checks a tensor, redistributes it and types the result."""
        return _TypedRedistribution(self, transform, site.hook_point is HookPoint.RUN)

    def annotated(self, site: Site, step: SiteStep) -> TensorTransform:
        """Returns a transform that checks a tensor and returns it."""
        return _TypedAnnotation(self, site, step)

    def operator(self, site: Site, step: SiteStep, function: TorchFunction) -> TorchFunction:
        """Returns what replaces an operator: it checks the first tensor, and types the result."""
        if step.kind is OpKind.FACTORY:
            return self._creation(step, function)
        name = str(step.index).partition(":")[0]
        if name not in (*_LOSSES, *_PLACED_AS_INPUT):
            return function  # torch's operator on local tensors, whose types are propagated
        annotation = _TypedAnnotation(self, site, step)

        @functools.wraps(function, updated=())
        def typed(*args: Any, **kwargs: Any) -> Any:
            first = annotation(next(one for one in tree_leaves((args, kwargs)) if _is_tensor(one)))
            with self.spmd.no_typecheck():
                result = function(*args, **kwargs)
                result = result.view_as(result) if result is first else result
            types = self.types_of(first)
            if not first.requires_grad:  # R, which the result need not be, as it may have one
                types = {axis: one for axis, one in types.items() if one is not self.spmd.R}
            if name in _LOSSES:
                types |= self._of_loss(name, first, result, step)
            return self.assign(result, types)

        return typed

    def _creation(self, step: SiteStep, create: TorchFunction) -> TorchFunction:
        """Returns what creates tensors, and types them as the shards that they are."""

        def typed(*args: Any) -> Any:
            with self.spmd.no_typecheck():
                created = create(*args)
            if not _is_tensor(created):
                return created
            sharded = [
                axis
                for axis, move in step.moves.items()
                if getattr(move.dst, "dim", created.ndim) < created.ndim
            ]
            return self.assign(created, dict.fromkeys(sharded, self.spmd.V))

        return typed

    def _of_loss(
        self, name: str, tensor: torch.Tensor, loss: torch.Tensor, step: SiteStep
    ) -> dict[str, Any]:
        """Returns the types of a loss along the axes that shard its input.

        It is a rank's term of a sum, or the losses of its rows; along an axis that shards classes
        it is whole, as cross entropy reduces over them in forward and backward.
        """
        classes = min(1, tensor.ndim - 1) if name in ("cross_entropy", "nll_loss") else None
        of_rows = self.spmd.P if loss.ndim == 0 else self.spmd.V
        return {
            axis: self.spmd.I if getattr(move.dst, "dim", None) == classes else of_rows
            for axis, move in step.moves.items()
            if not move.dst.is_replicate()
        }

    def check(
        self, tensor: torch.Tensor, placements: Mapping[str, tuple[Placement, Placement | None]],
        what: str,
    ) -> None:  # fmt: skip
        """Checks a tensor along some axes.

        Args:
            tensor: without a type along an axis it is accepted: the plan declares its placement.
            placements: by axis, the tensor's and its gradient's; None: the gradient's is not known.
            what: begins the message.

        Raises:
            ValueError: a type is not that of the placements.
        """
        found = self.types_of(tensor)
        for axis, (placement, gradient) in placements.items():
            expected = self._accepted(placement, gradient, tensor.requires_grad)
            if axis in found and found[axis] not in expected:
                raise ValueError(
                    f"{what}: expected a tensor of type "
                    f"{' or '.join(one.value for one in expected)} along {axis!r}, as the plan "
                    f"says it is {_described(placement, gradient)}, got type {found[axis].value}: "
                    f"{self._remedy(found[axis], axis)}"
                )

    def _accepted(
        self, placement: Placement, gradient: Placement | None, requires_grad: bool
    ) -> Sequence[Any]:
        spmd = self.spmd
        if isinstance(placement, Partial):
            return spmd.P, spmd.V  # ranks have different terms of the sum
        if isinstance(placement, Replicate) and (gradient is None or not requires_grad):
            return spmd.I, spmd.R
        return (self.type_of(placement, gradient),)

    def _remedy(self, found: Any, axis: str) -> str:
        spmd = self.spmd
        if found is spmd.R:
            return (
                f"each rank has the tensor, and its gradient is the sum of the ranks' gradients; "
                f"reduce that where modules of different shards share the tensor, by "
                f"redistribute(path, Replicate(), Replicate(), {axis!r}, grad_src=Partial(), "
                f"grad_dst=Replicate())"
            )
        if found is spmd.I:
            return (
                f"each rank has the tensor and the same gradient; correct the placement before "
                f"this entry, or where ranks compute different parts of what follows, add "
                f"grad_src=Partial() to an entry for {axis!r} that replicates it"
            )
        if found is spmd.V:
            return (
                f"ranks have different values; redistribute them along {axis!r} where they arise, "
                f"as redistribute(path, Partial(), Replicate(), {axis!r}) does with the output of "
                f"a row parallel Linear"
            )
        return f"reduce it along {axis!r} first"


class TypedOperators(TorchFunctionMode):
    """Completes the types of operators, and says in the plan's terms what an operator refuses.

    Tensors that a model creates itself are replicated, as are those that no entry places, where
    spmd_types leaves random ones without types. It is entered inside of the checker.

    Args:
        types: of the plan.
    """

    def __init__(self, types: PlanTypes) -> None:
        super().__init__()
        self._types = types

    def __torch_function__(
        self, func: TorchFunction, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        spmd, kwargs = self._types.spmd, kwargs or {}
        if not spmd.is_type_checking():
            return func(*args, **kwargs)
        if func is apply_redistribution:  # a call in the model's own code
            return _TypedRedistribution(self._types, args[1].transform)(args[0])
        operands = [*filter(_is_tensor, tree_leaves((args, kwargs)))]
        self._mix_without_gradients(operands)
        if inspect.unwrap(func) in _MEANS and kwargs.get("reduction", "mean") == "mean":
            self._refuse_local_mean(func.__name__, operands)
        try:
            result = func(*args, **kwargs)
        except spmd.types.SpmdTypeError as error:
            raise ValueError(self._refusal(func, operands, error)) from error
        for one in filter(_is_tensor, tree_leaves(result)):
            if not spmd.get_local_type(one):
                self._types.assign(one, {})
        return result

    def _mix_without_gradients(self, operands: Sequence[torch.Tensor]) -> None:
        """Lets operands without a gradient be R or I, as those with one are.

        So does spmd-types 0.3; 0.2 refuses an operator with both, such as an embedding of indices.
        """
        spmd = self._types.spmd
        for axis in self._types.axes.values():
            typed = [(one, spmd.get_local_type(one).get(axis)) for one in operands]
            found = {one for _, one in typed}
            if spmd.I not in found or found == {spmd.I}:
                continue
            has_gradient = {id(one) for one in operands if one.requires_grad}
            fixed = {one for tensor, one in typed if id(tensor) in has_gradient} & {spmd.R, spmd.I}
            common = spmd.I if fixed == {spmd.I} else spmd.R
            for tensor, one in typed:
                if id(tensor) not in has_gradient and one in (spmd.R, spmd.I) and one != common:
                    spmd.mutate_type(tensor, axis, src=one, dst=common)

    def _refuse_local_mean(self, name: str, operands: Sequence[torch.Tensor]) -> None:
        """Refuses a mean over the rows of a rank, which is no term of the mean over all rows."""
        for axis, found in self._types.types_of(operands[0]).items():
            if found is self._types.spmd.V:
                raise ValueError(
                    f"{name}: expected a tensor that is replicated along {axis!r}, or an entry, "
                    f"got type V without one: it is the mean over this rank's rows; add "
                    f"annotate('<op:{name}>', Shard(dim), {axis!r}) for the module that calls it"
                )

    def _refusal(
        self, func: TorchFunction, operands: Sequence[torch.Tensor], error: Exception
    ) -> str:
        types, spmd = self._types, self._types.spmd
        listed = "; ".join(types.described(one) for one in operands)
        text = f"{getattr(func, '__name__', func)} of {listed}"
        for axis in types.axes:
            invariant = [one for one in operands if types.types_of(one).get(axis) is spmd.I]
            if not invariant or len(invariant) == len(operands):
                continue
            names = [types.names[id(one)] for one in invariant if id(one) in types.names]
            remedy = (
                f"annotate({names[0] + '.grad'!r}, Partial(), {axis!r}), or, for what is added "
                f"once to a Partial, redistribute({names[0]!r}, Replicate(), Partial(), {axis!r})"
                if names
                else f"redistribute(path, Replicate(), Replicate(), {axis!r}, grad_src=Partial(), "
                f"grad_dst=Replicate()) for the input of the outermost module in which ranks "
                f"compute different parts"
            )
            return (
                f"{text}: expected no tensor of type I along {axis!r}, whose gradient all ranks "
                f"have, beside tensors of other types, with which each rank computes another part "
                f"of its gradient; add {remedy}"
            )
        return f"{text}: {str(error.args[0]).splitlines()[0]}"


class _TypedRedistribution:
    settled: DTensorSpec | None = None  # part of the protocol of hooks; here nothing is a DTensor

    def __init__(
        self, types: PlanTypes, transform: StaticRedistribution, is_param: bool = False
    ) -> None:
        self._types, self._transform, self._is_param = types, transform, is_param
        along = {axis: one for axis, one in transform.placements.items() if axis in types.axes}
        self._before = {axis: (one.src, one.grad_dst) for axis, one in along.items()}
        self._after = {
            axis: types.type_of(one.dst, one.grad_src)
            for axis, one in along.items()
            if one.grad_src is not None
        }

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        types = self._types
        # Without a gradient, an entry that changes nothing is no promise: a mask may be sharded.
        if tensor.requires_grad or not self._transform.is_identity:
            types.check(tensor, self._before, self._transform.what)
        with types.spmd.no_typecheck():
            result = self._transform(tensor)
            # Others may use the tensor with the type before.
            result = result.view_as(result) if result is tensor else result
        after = types.types_of(tensor) | self._after
        if self._is_param:
            # A bias that one rank adds: F.linear is not linear to spmd_types, which refuses P.
            after = {a: types.spmd.V if one is types.spmd.P else one for a, one in after.items()}
        return types.assign(result, after)


class _TypedAnnotation:
    settled: DTensorSpec | None = None

    def __init__(self, types: PlanTypes, site: Site, step: SiteStep) -> None:
        self._types = types
        self._what = f"{site.name}:{step.tensor}:{step.index}"
        self._is_output = not site.path and site.hook_point is HookPoint.FORWARD
        self._placements: dict[str, tuple[Placement, Placement | None]] = {
            axis: (move.dst, None) for axis, move in step.moves.items() if axis in types.axes
        }

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self._types.check(tensor, self._placements, self._what)
        if self._is_output:
            self._types.outputs.append((tensor, self._placements))
        return tensor


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _described(placement: Placement, gradient: Placement | None) -> str:
    text = format_placement(placement)
    return text if gradient is None else f"{text} with a gradient of {format_placement(gradient)}"
