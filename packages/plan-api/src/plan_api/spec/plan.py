"""What the user writes: which tensor is placed how, on which mesh axis, and when.

Note: an *axis* is one of the plan's mesh. An *entry* is one call on a plan. A *site* is where in a
model an entry applies: a module and a moment. A later entry on the same tensor, axis and phase
overrides an earlier one. Tensors for which a plan says nothing are whole on every rank.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plan_api.spec.arguments import Axes, Placements, check_counts
from plan_api.spec.context_entries import ContextEntries
from plan_api.spec.path import Kind, parse
from plan_api.spec.phase import Phase
from plan_api.spec.serialization import entries_from_json, entries_to_json
from plan_api.spec.verb import Verb

if TYPE_CHECKING:
    from plan_api.inspect.explain import Explanation

__all__ = ["Plan"]


class Plan(ContextEntries):
    """Parallelism of a model, said outside of it (veScale, section 4 and appendix 12).

    Args:
        mesh: on which all its DTensors live; entries choose axes of it.
        cover: whether every parameter has to be named by an entry, or `parallelize` refuses.

    Placements are given for the axes of an entry: one placement, or one per axis. Axes are named by
    ``mesh=``: a name, a number, several of them, or a sub-mesh such as ``mesh["tp"]``; by default
    all. Methods return the plan, so that calls can be chained.
    """

    def __init__(self, mesh: DeviceMesh, *, cover: bool = False) -> None:
        super().__init__(mesh)
        self.cover = cover

    def shard(
        self,
        path: str,
        placements: Placements,
        mesh: Axes = None,
        phase: Phase = Phase.INIT,
        *,
        unit: int | str | None = None,
    ) -> Plan:
        """Places tensors: parameters at the given phase, buffers once, activations when they pass.

        Args:
            path: see `plan_api.spec.path`.
            placements: per axis.
            mesh: the axes.
            phase: of parameters; see `Phase`.
            unit: of a parameter whose dim is made of units that no two ranks can share, as that of
                a projection is of heads: their size, or the attribute of the parameter's module,
                or the next one above it that has one, that tells it, as in ``"head_dim"``.

        Raises:
            ValueError: the path, an axis, or the number of placements is wrong; see the message.
        """
        kind = parse(path).kind
        if not isinstance(phase, Phase):
            raise ValueError(
                f"shard({path!r}): phase: expected a plan_api.Phase, such as Phase.RUN, got "
                f"{phase!r}"
            )
        if kind is not Kind.STATE:
            for what, given in (("phase", phase is not Phase.INIT), ("unit", unit is not None)):
                if given:
                    raise ValueError(
                        f"shard({path!r}, {what}=): only parameters have {what}s; leave it out"
                    )
        if kind is Kind.OPERATOR:
            raise ValueError(
                f"shard({path!r}): operators' inputs are where their module's are; annotate() "
                f"says where that is"
            )
        if unit is not None and not isinstance(unit, str):
            if isinstance(unit, bool) or not isinstance(unit, SupportsIndex):
                raise ValueError(
                    f"shard({path!r}): unit: expected a size or an attribute's name, got {unit!r}"
                )
            unit = operator.index(unit)
            if unit < 1:
                raise ValueError(f"shard({path!r}): unit: expected at least 1, got {unit}")
        options = {} if unit is None else {"unit": unit}
        return self._add(Verb.SHARD, path, mesh, placements, phase=phase, options=options)

    def redistribute(
        self,
        path: str,
        src: Placements,
        dst: Placements,
        mesh: Axes = None,
        *,
        grad_src: Placements | None = None,
        grad_dst: Placements | None = None,
    ) -> Plan:
        """Moves activations from one placement to another, and their gradients back.

        Static mode has to know all four; Eager finds out what is not said, and checks ``src``.

        Args:
            path: of an input or output; or of a parameter, as operators of its module take it (the
                bias of a row parallel Linear is Partial there), which DTensors do by themselves.
            src: what they are before, per axis; a plain tensor is taken for this.
            dst: what they become, per axis.
            mesh: the axes.
            grad_src: what the gradient of the result is; by default what autograd finds.
            grad_dst: what it becomes; by default ``src``.

        Raises:
            ValueError: as `shard`; or the path names a gradient or an operator, or ``src`` is None.
        """
        if src is None:
            raise ValueError(
                f"redistribute({path!r}): src: expected what the tensor is before, such as "
                f"Replicate(), got None; shard() moves an input or output whatever it is before"
            )
        if parse(path).kind in (Kind.GRADIENT, Kind.OPERATOR):
            raise ValueError(
                f"redistribute({path!r}): moves inputs, outputs and parameters; annotate() says "
                f"what gradients and operators' inputs are"
            )
        return self._add(
            Verb.REDISTRIBUTE, path, mesh, dst, src=src, grad_src=grad_src, grad_dst=grad_dst
        )

    def annotate(self, path: str, placements: Placements, mesh: Axes = None) -> Plan:
        """Says how tensors are placed, without communication.

        A plain tensor becomes such a DTensor; one that is a DTensor has to be placed so already.
        Static mode has none, and is told by this how gradients are placed (``weight.grad`` is
        Partial: it is summed once), and what operators are given that depend on the whole, random
        ones and losses (``<op:dropout>``).

        Args:
            path: of an input or output, a gradient, or an operator.
            placements: per axis.
            mesh: the axes.

        Raises:
            ValueError: as `shard`; or the path names a parameter.
        """
        if parse(path).kind is Kind.STATE:
            raise ValueError(
                f"annotate({path!r}): parameters are placed by shard(); annotate inputs, outputs "
                f"or a gradient, as in {path + '.grad'!r}"
            )
        return self._add(Verb.ANNOTATE, path, mesh, placements)

    def factory(self, path: str, placements: Placements, mesh: Axes = None) -> Plan:
        """Places the tensors that modules make while they run, by `torch.zeros` and its friends.

        Args:
            path: of modules; what they call is theirs too.
            placements: per axis; a tensor that lacks the dim of a shard is whole.
            mesh: the axes.

        Raises:
            ValueError: as `shard`; or the path names a tensor.
        """
        return self._add(Verb.FACTORY, path, mesh, placements)

    def local(self, path: str, placements: Placements, mesh: Axes = None) -> Plan:
        """Runs modules on this rank's parts of their inputs and parameters, as plain tensors.

        For what DTensors cannot do, such as loops over indices that depend on the data. Random
        numbers there are this rank's own.

        Args:
            path: of modules, with all that is in them.
            placements: of what they return, per axis; along other axes as their first input.
            mesh: the axes.

        Raises:
            ValueError: as `shard`; or the path names a tensor.
        """
        return self._add(Verb.LOCAL, path, mesh, placements)

    def index(
        self,
        path: str,
        placements: Placements,
        mesh: Axes = None,
        *,
        count: str | None = None,
        flag: str | None = None,
    ) -> Plan:
        """Says that an argument counts what is divided among ranks, such as experts.

        Its module runs on local tensors (`local`), and there it gets numbers that count its own
        parts: from 0, and what other ranks have is the number of its own, which the module has to
        leave out. What is placed is not this argument, which like the others has to be whole along
        these axes, but the module's parameters.

        Args:
            path: of the argument, a tensor of integers.
            placements: per axis, of the parameters that it counts, all with one dim.
            mesh: the axes.
            count: the module's attribute that has how many there are; while it runs, its own.
            flag: the module's attribute that is True while it runs so.

        Raises:
            ValueError: as `shard`; or the path names no argument, or a placement is no Shard.
        """
        check_counts(f"index({path!r})", path, placements)
        options = {"count": count, "flag": flag}
        return self._add(Verb.INDEX, path, mesh, placements, options=options)

    def dispatch(
        self,
        path: str,
        placements: Placements,
        mesh: Axes = None,
        *,
        tokens: int | str = 0,
        weights: int | str | None = None,
        count: str | None = None,
    ) -> Plan:
        """Sends tokens to the ranks that have what they choose, such as experts, and back.

        As `index`, where tokens are cut along these axes: the module runs on those of all ranks
        that have chosen its own parts, a row a choice, with weights of 1. What it makes of them, a
        row each, is weighted and added up at the tokens' ranks. None is dropped, or padded.

        Args:
            path: of the argument with the choices, a tensor of integers (tokens, choices); its
                module, or one that it is in, runs on local tensors (`local`).
            placements: per axis, of the parameters that it counts, all with one dim.
            mesh: the axes; of several the first of the mesh is the outermost, as of shards.
            tokens: the argument (tokens, features), by number or name.
            weights: that with a weight for each choice, (tokens, choices); None: there is none.
            count: the module's attribute that has how many there are; while it runs, its own.

        Raises:
            ValueError: as `index`.
        """
        check_counts(f"dispatch({path!r})", path, placements)
        options = {"tokens": tokens, "weights": weights, "count": count}
        return self._add(Verb.DISPATCH, path, mesh, placements, options=options)

    def fully_shard(
        self,
        path: str,
        mesh: Axes,
        granularity: str | None = None,
        reshard_after_forward: bool | None = None,
        *,
        flat: bool = False,
        replicate: int = 1,
    ) -> Plan:
        """Applies the fsdp package to modules, after all other parameters are placed.

        Parameters that the plan cuts along the same axes, such as experts, are left out. It needs
        ``mode="eager"``: `parallelize` refuses it in static mode.

        Args:
            path: of modules.
            mesh: the axes: one to shard on, or two, of which the first replicates (HSDP).
            granularity: of the shards, as fsdp knows it.
            reshard_after_forward: whether parameters are gathered again in backward; None: all but
                the root's.
            flat: whether several axes are one, to shard on.
            replicate: how many copies the ranks of one axis hold, each shared by ranks that are
                neighbours (HSDP on one axis, on which a batch is cut once).

        Raises:
            ValueError: as `shard`; or the path names a tensor. `parallelize` refuses a granularity
                that the package does not know, and parameters with phases along the same axes.
        """
        if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"fully_shard({path!r}): reshard_after_forward: expected True, False or None, got "
                f"{reshard_after_forward!r}: parameters of a plan are DTensors, which are not "
                f"kept on fewer ranks"
            )
        options: dict[str, Any] = {
            "granularity": granularity, "reshard_after_forward": reshard_after_forward,
        }  # fmt: skip
        options |= {"flat": True} if flat else {}
        if isinstance(replicate, SupportsIndex):
            replicate = operator.index(replicate)
        options |= {"replicate": replicate} if replicate != 1 else {}
        return self._add(Verb.FULLY_SHARD, path, mesh, None, options=options)

    def eager(self, path: str) -> Plan:
        """Keeps modules on DTensors in static mode; in Eager all are, and it says nothing.

        For modules whose own code moves tensors between operators, where no hook reaches. What
        enters is placed as the plan says it is before (`annotate`, or the ``src`` of `redistribute`
        on the module's ``<in>``), and whole if it says nothing.

        Args:
            path: of modules, with all that is in them.

        Raises:
            ValueError: the path names a tensor.
        """
        return self._add(Verb.EAGER, path, (), None)

    def explain(self, model: nn.Module) -> Explanation:
        """Prints what this plan does to a model, as a table, and returns it.

        With rich it is drawn, without it is plain text.

        Args:
            model: on any device, ``meta`` included; it is not changed.

        Raises:
            ValueError: the plan does not fit the model.
        """
        from plan_api.inspect.explain import explain, show

        found = explain(self, model)
        show(found)
        return found

    def to_json(self) -> str:
        """This plan as text, for `from_json`."""
        return entries_to_json(self.entries, self.mesh, self.cover)

    @classmethod
    def from_json(cls, text: str, mesh: DeviceMesh) -> Plan:
        """A plan that `to_json` has written, on a mesh that has its axes.

        Args:
            text: what `to_json` gave.
            mesh: of any size; its axes have the names that the plan knows.

        Raises:
            ValueError: the text is no plan, or the mesh lacks an axis.
        """
        entries, cover = entries_from_json(text, mesh)
        plan = cls(mesh, cover=cover)
        plan._entries = entries
        return plan

    @classmethod
    def from_tp_plan(cls, model: nn.Module, mesh: DeviceMesh, tp: str = "tp") -> Plan:
        """The tensor parallelism that a model of transformers brings along, its `_tp_plan`.

        Join it with entries for other axes, such as the batch's, by ``|``.

        Args:
            model: of transformers; it is not changed.
            mesh: with the axis.
            tp: the axis of tensor parallelism.

        Raises:
            ValueError: the model has none, or one with a style that is not known here; the mesh
                lacks the axis.
        """
        from plan_api.spec.tp_plan import add_tp_plan

        plan = cls(mesh)
        add_tp_plan(plan, model, tp)
        return plan

    def under(self, prefix: str) -> Plan:
        """The plan of a model that has this one's model as its submodule ``prefix``."""
        moved = Plan(self.mesh, cover=self.cover)
        moved._entries = [replace(one, path=one.path.under(prefix)) for one in self._entries]
        return moved

    def __or__(self, other: Plan) -> Plan:
        """Both plans; where they say different things of one tensor, the right one holds."""
        if self.mesh != other.mesh:
            raise ValueError(
                f"plans on {self.mesh} and on {other.mesh} cannot be joined: one tensor cannot be "
                f"on both; make them for one mesh, with the axes that each needs"
            )
        joined = Plan(self.mesh, cover=self.cover or other.cover)
        joined._entries = [*self._entries, *other._entries]
        return joined
