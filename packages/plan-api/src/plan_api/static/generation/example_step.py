"""The step of a model that is run to see how its tensors are placed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from plan_api.installation import apply_plan, installed
from plan_api.lowering.ir import Lowered
from plan_api.options import ParallelizeOptions
from plan_api.plan import Plan
from plan_api.static.generation.trace import EagerTrace, trace_eager_step
from plan_api.static.redistribute import SiteTypes
from plan_api.static.shadow_model import FakeTensorFactory, class_before_fully_shard, shadow_of

__all__ = ["ExampleStep"]


@dataclass(frozen=True)
class ExampleStep:
    """A model and the inputs of a step.

    Attributes:
        model: unmodified, or a shadow model of FakeTensors; steps do not change it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        use: the optional packages to use while a step runs; see `parallelize`.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    use: Sequence[str] | None

    @classmethod
    def checked(
        cls, function: str, plan: Plan, model: nn.Module, example_inputs: Any, fake: bool,
        use: Sequence[str] | None,
    ) -> ExampleStep:  # fmt: skip
        """Makes the step of a model, on FakeTensors if `fake`.

        Args:
            function: begins messages.
            plan: whose devices FakeTensors have.
            model: any.
            example_inputs: a tuple of arguments, or a dict of keyword arguments.
            fake: whether to run on FakeTensors.
            use: see `parallelize`.

        Raises:
            ValueError: example_inputs are neither, or forward does not take them; fully_shard has
                been applied to the model.
        """
        args, kwargs = _checked_inputs(function, model, example_inputs)
        if fake:
            factory = FakeTensorFactory(plan.mesh.device_type)
            model = shadow_of(model, factory.fake)
            args, kwargs = factory.fake_inputs(args, kwargs)
        return cls(model, args, kwargs, use)

    def parallelized(
        self,
        plan: Plan,
        mode: Literal["eager", "static"] = "eager",
        types: SiteTypes | None = None,
    ) -> nn.Module:
        """Applies a plan to a shadow of the model, and logs no overrides: `parallelize` will.

        Args:
            plan: to apply.
            mode: as in `parallelize`.
            types: in static mode, checks the types of tensors while modules run.
        """
        model = shadow_of(self.model)
        guard_steps = 0 if mode == "static" else None
        options = ParallelizeOptions.checked(plan.mesh, mode, guard_steps, None, None, self.use)
        apply_plan(model, plan, options, types=types)
        return model

    def check_static(self, plan: Plan) -> None:
        """Runs a step of static mode and one of Eager, which are compared by shapes and dtypes.

        All ranks of the plan's mesh call it, with FakeTensors.

        Args:
            plan: for static mode, without policies.

        Raises:
            StaticError: on every rank, if on any of them static mode cannot run the model, or
                computes tensors of other shapes.
        """
        static = self.parallelized(plan, "static")
        installed(static).check(*self.args, **self.kwargs)

    def trace(self, plan: Plan) -> tuple[Lowered, EagerTrace]:
        """Runs a step of Eager; returns the plan, lowered, and what the step has shown."""
        eager = self.parallelized(plan)
        lowered = installed(eager).lowered
        installed(eager).remove()
        return lowered, trace_eager_step(eager, lowered, plan.mesh, self.args, self.kwargs)


def _checked_inputs(
    function: str, model: nn.Module, example_inputs: Any
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Returns positional and keyword arguments that the model's forward takes."""
    if any(class_before_fully_shard(module) for module in model.modules()):
        raise ValueError(
            f"{function}: expected a model before fully_shard, got one whose parameters it has "
            f"sharded; plan with an unmodified model, which may be on meta (fake=True)"
        )
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), example_inputs
    elif isinstance(example_inputs, (tuple, list)):
        args, kwargs = tuple(example_inputs), {}
    else:
        raise ValueError(
            f"{function}: expected example_inputs as a tuple of arguments, or a dict of "
            f"keyword arguments, got a {type(example_inputs).__name__}; wrap it"
        )
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{function}: forward of {type(model).__name__} does not take these "
            f"example_inputs: {error}"
        ) from error
    return args, kwargs
