"""The plan that a user writes: which tensor is placed how, on which mesh axis, and when."""

from __future__ import annotations

from typing import Self

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plan_api.inspect.explain import Explanation, explain, print_explanation
from plan_api.lowering.fully_shard import entry_with_values
from plan_api.lowering.lower import lower
from plan_api.lowering.stage import entries_of_stage
from plan_api.spec.arguments import Axes
from plan_api.spec.axes import resolve_axes
from plan_api.spec.plan_entries import PlanEntries
from plan_api.spec.serialization import entries_from_json, entries_to_json
from plan_api.spec.transformers.plans import TransformersAxes, add_transformers_plans

__all__ = ["Plan"]


class Plan(PlanEntries):
    """The parallelism of a model, written outside the model (veScale, section 4 and appendix 12).

    Args:
        mesh: the mesh of all DTensors; entries choose axes of it.
        cover: whether every parameter has to be named by an entry, or `parallelize` refuses.

    Placements are given for the axes of an entry: one placement, or one per axis. Axes are named by
    ``mesh=``: a name, a number, several of them, or a sub-mesh such as ``mesh["tp"]``; by default
    all. Methods return the plan, so that calls can be chained.
    """

    def explain(self, model: nn.Module, *, overlap: str | None = None) -> Explanation:
        """Prints what this plan does to a model, as a table, and returns it.

        The table is drawn with rich if it is installed, and is plain text otherwise.

        Args:
            model: on any device, ``meta`` included; it is not changed.
            overlap: as in `parallelize`, for rows that say what it overlaps.

        Raises:
            ValueError: the plan does not fit the model, or nothing overlaps along the axis.
        """
        found = explain(self, model, overlap=overlap)
        print_explanation(found)
        return found

    def for_stage(self, stage: nn.Module, model: nn.Module, *, last: bool) -> Self:
        """Returns the plan of a pipeline stage, which is a part of this plan's model.

        Its modules and tensors have their names in the model. Left out are entries for modules and
        tensors that it has not, for arguments that its `forward` does not take, and, but for the
        last stage, for outputs of the model. Add entries for what it takes and returns instead.

        Args:
            stage: a part of the model, on any device; it is not changed.
            model: the whole model, on any device, ``meta`` included; it is not changed.
            last: whether the stage returns what the model returns.

        Raises:
            ValueError: an entry names an input or output of several modules, of which the stage
                calls some as the model does, and others not.
        """
        part = type(self)(self.mesh, cover=self.cover)
        part.of_stage = True
        part._entries = [*entries_of_stage(self.entries, stage, model, last=last)]
        return part

    def resolved(self, model: nn.Module) -> Self:
        """Returns this plan with the values that functions return for a model's parameters.

        Args:
            model: on any device, ``meta`` included; it is not changed.

        Raises:
            ValueError: the plan does not fit the model.
        """
        lowered = lower(self, model, mode="static")  # which takes what Eager takes, and more
        plan = type(self)(self.mesh, cover=self.cover)
        plan.of_stage = self.of_stage
        plan._entries = [entry_with_values(entry, lowered) for entry in self.entries]
        return plan

    def to_json(self) -> str:
        """Returns this plan as text, for `from_json`.

        Raises:
            ValueError: it has a function, which `resolved` replaces by its values for a model.
        """
        return entries_to_json(self.entries, self.mesh, self.cover, self.of_stage)

    @classmethod
    def from_json(cls, text: str, mesh: DeviceMesh) -> Self:
        """Reads a plan that `to_json` has written, for a mesh that has its axes.

        Args:
            text: of `to_json`.
            mesh: of any size, with axes of the names in the plan.

        Raises:
            ValueError: the text is no plan, or the mesh lacks an axis.
        """
        entries, cover, of_stage = entries_from_json(text, mesh)
        plan = cls(mesh, cover=cover)
        plan.of_stage = of_stage
        plan._entries = entries
        return plan

    @classmethod
    def from_tp_plan(
        cls,
        model: nn.Module,
        mesh: DeviceMesh,
        tp: str | None = "tp",
        *,
        dp: Axes = None,
        ep: str | None = None,
        fsdp: Axes = None,
    ) -> Self:
        """Makes a plan from those that a transformers model brings along.

        Batches are sharded along ``dp``, ``ep`` and ``fsdp``. Join it with further entries, such as
        the loss's, by ``|``.

        Args:
            model: of transformers; it is not changed.
            mesh: with the axes.
            tp: the axis of its `_tp_plan`, which shards modules; None: none.
            dp: further axes along which batches are sharded; None: none.
            ep: the axis of its `_ep_plan`, which shards experts by number and dispatches tokens to
                them; None: none.
            fsdp: the axes of its `_fsdp_plan`, along which fully_shard shards the parameters of
                each of its modules; several are flattened. None: none.

        Raises:
            ValueError: the model lacks one of these, or has one with an unknown style; the mesh
                lacks an axis.
        """
        plan, what = cls(mesh), "from_tp_plan"
        sharded = resolve_axes(() if fsdp is None else fsdp, mesh, what)
        others = [*resolve_axes(() if dp is None else dp, mesh, what), ep]
        data = [axis for axis in plan.axes if axis in (*sharded, *others)]
        axes = TransformersAxes(tp, ep, sharded, data)
        add_transformers_plans(plan, model, axes)
        return plan
