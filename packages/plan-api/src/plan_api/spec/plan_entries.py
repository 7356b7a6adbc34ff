"""The entries of a plan, and the methods that add them.

Note: an *axis* is one of the plan's mesh. An *entry* is one call on a plan. A *site* is where in a
model an entry applies: a module and a hook point. A later entry on the same tensor, axis and phase
overrides an earlier one. Tensors that a plan does not name are replicated.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, SupportsIndex, TypeAlias, get_args

from torch.distributed.tensor import Shard

from plan_api.spec.arguments import Axes, Placements, check_chunks, check_indexed_placements
from plan_api.spec.entry import EntryKind, Phase
from plan_api.spec.path import PathKind, parse_path
from plan_api.spec.policy_entries import PolicyEntries

__all__ = ["ContextMethod", "PlanEntries", "SequenceOrder", "UlyssesRing", "Unit"]


@dataclass(frozen=True)
class UlyssesRing:
    """A method of `Plan.context`: Ulysses within a host, and the ring across (arXiv 2405.07719).

    Attributes:
        degree: the number of consecutive ranks along the axis that shard heads among each other, as
            the ranks of a host; keys and values are sent around the ring of these groups.
    """

    degree: int

    def __post_init__(self) -> None:
        """Checks the degree.

        Raises:
            ValueError: it is no integer, or less than 2.
        """
        degree: Any = self.degree
        is_number = isinstance(degree, SupportsIndex) and not isinstance(degree, bool)
        if not is_number or operator.index(degree) < 2:
            raise ValueError(
                f"UlyssesRing: expected a degree of at least 2, got {degree!r}; use "
                f"method='ring' for a ring alone"
            )


_MethodName: TypeAlias = Literal["ring", "ulysses", "all-gather"]
ContextMethod: TypeAlias = _MethodName | UlyssesRing
SequenceOrder: TypeAlias = Literal["zigzag", "contiguous", "balanced"]
Unit: TypeAlias = int | str | Sequence[str]

_QUERY_SEQUENCE_DIM = 2  # of (batch, heads, sequence, features)


class PlanEntries(PolicyEntries):
    """The calls on a plan that place tensors, beside those of `PolicyEntries`."""

    def shard(
        self,
        path: str,
        placements: Placements,
        mesh: Axes = None,
        phase: Phase = Phase.INIT,
        *,
        unit: Unit | None = None,
    ) -> Self:
        """Places parameters in a phase, buffers once, and activations at their hook points.

        Args:
            path: see `plan_api.spec.path`.
            placements: one, or one per axis.
            mesh: the axes.
            phase: of parameters; see `Phase`.
            unit: for a parameter dim made of units that have to stay on one rank, such as the heads
                of a projection: the size of a unit, or the name of an attribute with it, such as
                ``"head_dim"``, of the parameter's module or the nearest one above it that has one.
                Of several names the unit is their product, in static mode, where the axis need not
                divide the number of units; in Eager it is the last one, and the axis has to.

        Raises:
            ValueError: the path, an axis, or the number of placements is wrong; see the message.
        """
        kind = parse_path(path).kind
        if not isinstance(phase, Phase):
            raise ValueError(
                f"shard({path!r}): phase: expected a plan_api.Phase, such as Phase.RUN, got "
                f"{phase!r}"
            )
        if kind is not PathKind.STATE:
            for name, given in (("phase", phase is not Phase.INIT), ("unit", unit is not None)):
                if given:
                    raise ValueError(
                        f"shard({path!r}, {name}=): only parameters have {name}s; leave it out"
                    )
        if kind is PathKind.OPERATOR:
            raise ValueError(
                f"shard({path!r}): expected a parameter, an input or an output, got an operator, "
                f"whose inputs have the placements that annotate() says"
            )
        options = {} if unit is None else {"unit": _checked_unit(unit, f"shard({path!r})")}
        return self._add(EntryKind.SHARD, path, mesh, placements, phase=phase, options=options)

    def redistribute(
        self,
        path: str,
        src: Placements,
        dst: Placements,
        mesh: Axes = None,
        *,
        grad_src: Placements | None = None,
        grad_dst: Placements | None = None,
    ) -> Self:
        """Redistributes activations, and their gradients in backward.

        Static mode needs all four placements; Eager infers those not given, and checks ``src``.

        Args:
            path: of an input or output; or of a parameter, as the operators of its module take it
                (the bias of a row parallel Linear is Partial there), which DTensor does by itself.
            src: the placements before; a plain tensor is taken as such a DTensor.
            dst: the placements afterwards.
            mesh: the axes.
            grad_src: the placements of the gradient of the result; by default what autograd makes.
            grad_dst: the placements of the gradient afterwards; by default ``src`` in static mode,
                and what DTensor makes in Eager: an unchanged gradient where ``src`` equals ``dst``.

        Raises:
            ValueError: as `shard`; or the path names a gradient or an operator, or ``src`` is None.
        """
        if src is None:
            raise ValueError(
                f"redistribute({path!r}): src: expected the placements before, such as "
                f"Replicate(), got None; shard() redistributes from any placements"
            )
        if parse_path(path).kind in (PathKind.GRADIENT, PathKind.OPERATOR):
            raise ValueError(
                f"redistribute({path!r}): expected an input, an output or a parameter; annotate() "
                f"says how gradients and operators' inputs are placed"
            )
        return self._add(
            EntryKind.REDISTRIBUTE, path, mesh, dst, src=src, grad_src=grad_src, grad_dst=grad_dst
        )

    def annotate(
        self,
        path: str,
        placements: Placements,
        mesh: Axes = None,
        *,
        unit: Unit | None = None,
    ) -> Self:
        """Declares the placements of tensors, without communication.

        A plain tensor becomes such a DTensor; a DTensor has to have these placements. Static mode
        has no DTensors, and takes from this how gradients are placed (a ``weight.grad`` that is
        Partial is summed once), and the inputs of operators that depend on the whole tensor: random
        ones and losses (``<op:dropout>``).

        Args:
            path: of an input or output, a gradient, or an operator.
            placements: one, or one per axis.
            mesh: the axes.
            unit: of an operator's sharded dim, as in `shard`: in static mode ranks have different
                numbers of units where they have of the parameters around it.

        Raises:
            ValueError: as `shard`; or the path names a parameter, or a unit is given for what is no
                operator.
        """
        if parse_path(path).kind is PathKind.STATE:
            raise ValueError(
                f"annotate({path!r}): expected an input, an output or a gradient, as in "
                f"{path + '.grad'!r}; parameters are placed by shard()"
            )
        if unit is not None and parse_path(path).kind is not PathKind.OPERATOR:
            raise ValueError(f"annotate({path!r}, unit=): only operators have units; leave it out")
        options = {} if unit is None else {"unit": _checked_unit(unit, f"annotate({path!r})")}
        return self._add(EntryKind.ANNOTATE, path, mesh, placements, options=options)

    def factory(
        self, path: str, placements: Placements, mesh: Axes = None, *, sizes: str = "global"
    ) -> Self:
        """Places the tensors that modules create while they run, by `torch.zeros` and the like.

        In Eager also those created by `new_zeros` and the like of a DTensor, which torch replicates
        where they have other sizes than it.

        Where modules with an entry are nested, the entry of the innermost applies. Static mode has
        no DTensors, and takes this rank's shard of what the code creates.

        Args:
            path: of modules, with all that they call.
            placements: one, or one per axis; a tensor that lacks the dim of a shard is replicated.
            mesh: the axes.
            sizes: which sizes the code passes for sharded dims in static mode: ``"global"``, as
                from a config, or ``"local"``, from the shape of a tensor that is sharded alike.
                In Eager all sizes are global.

        Raises:
            ValueError: as `shard`; or the path names a tensor, or there are no such sizes.
        """
        _check_among(sizes, ("global", "local"), f"factory({path!r}): sizes")
        options = {} if sizes == "global" else {"sizes": sizes}
        return self._add(EntryKind.FACTORY, path, mesh, placements, options=options)

    def local(self, path: str, placements: Placements, mesh: Axes = None) -> Self:
        """Runs modules on this rank's local tensors of their inputs and parameters.

        For what DTensors cannot do, such as loops over indices that depend on the data. Random
        numbers there are this rank's own.

        Args:
            path: of modules, with all modules inside them.
            placements: of their outputs, one, or one per axis; along other axes outputs have the
                placement of the first input.
            mesh: the axes.

        Raises:
            ValueError: as `shard`; or the path names a tensor.
        """
        return self._add(EntryKind.LOCAL, path, mesh, placements)

    def index(
        self,
        path: str,
        placements: Placements,
        mesh: Axes = None,
        *,
        count: str | None = None,
        flag: str | None = None,
    ) -> Self:
        """Declares that an argument indexes into parameters that are sharded, such as experts.

        Its module runs on local tensors (`local`), and gets indices into this rank's shard: from 0,
        and the size of the shard for what other ranks have, which the module has to skip. The
        placements are those of the module's parameters; the argument, like the others, has to be
        replicated along these axes.

        Args:
            path: of the argument, a tensor of integers.
            placements: of the parameters that it indexes into, all sharded on one dim.
            mesh: the axes.
            count: the module's attribute with the number of experts; while the module runs, the
                number of this rank's experts.
            flag: the module's attribute that is True while it runs on this rank's experts.

        Raises:
            ValueError: as `shard`; or the path names no argument, or a placement is no Shard.
        """
        check_indexed_placements(f"index({path!r})", path, placements)
        options = {"count": count, "flag": flag}
        return self._add(EntryKind.INDEX, path, mesh, placements, options=options)

    def dispatch(
        self,
        path: str,
        placements: Placements,
        mesh: Axes = None,
        *,
        tokens: int | str = 0,
        weights: int | str | None = None,
        count: str | None = None,
        chunks: int = 1,
        overlap: str | None = None,
    ) -> Self:
        """Dispatches tokens to the ranks of the experts that they chose, and combines the results.

        Like `index`, for tokens that are sharded along these axes: a token is sent once to each
        rank that has experts that it chose, with its choices and weights. The module runs on one
        row for each choice of this rank's experts, with one choice and its weight, sorted by
        expert, and returns a row each. Those of a token are summed before they are sent back, and
        then over the ranks. No token is dropped or padded, except for choices beyond a capacity
        (`limit_expert_capacity`), which are not sent.

        With several chunks a rank's tokens are sent in as many parts, and the module runs once for
        each, forward and backward, while others are sent: of the time of all-to-alls only the first
        part's and the last part's remain. The module's products are smaller, which takes processor
        time, so one chunk is best between ranks without latency. Outputs have the same bits for any
        number of chunks if each row of the module's output depends on no other row, bits included:
        some CPUs compute a product of one row differently, and a module may draw random numbers.
        Gradients of parameters are summed over chunks, and differ in their last bits.

        Args:
            path: of the argument with the choices, a tensor of integers (tokens, choices); its
                module, or one above it, runs on local tensors (`local`).
            placements: of the parameters that it indexes into, all sharded on one dim.
            mesh: the axes; the first of the mesh is the outermost, as for shards.
            tokens: the argument (tokens, features), by number or name.
            weights: the argument with a weight for each choice, (tokens, choices); None: no
                weights.
            count: the module's attribute with the number of experts; while the module runs, the
                number of this rank's experts.
            chunks: parts in which a rank sends its tokens, the same on all ranks.
            overlap: the name of a module beside the experts, such as ``"shared_experts"``, which
                runs while their results, and in backward the gradients of these, are sent. The
                module above has to call it with its own first input, behind the experts. None:
                nothing does.

        Raises:
            ValueError: as `index`; or ``chunks`` is not at least 1.
        """
        what = f"dispatch({path!r})"
        check_indexed_placements(what, path, placements)
        options: dict[str, Any] = {"tokens": tokens, "weights": weights, "count": count}
        check_chunks(what, chunks)
        options |= {"chunks": operator.index(chunks)} if chunks != 1 else {}
        options |= {"overlap": overlap} if overlap is not None else {}
        return self._add(EntryKind.DISPATCH, path, mesh, placements, options=options)

    def context(
        self,
        path: str,
        mesh: Axes,
        *,
        method: ContextMethod = "ring",
        order: SequenceOrder | None = None,
        heads: str | None = None,
    ) -> Self:
        """Computes `scaled_dot_product_attention` over a sequence that is sharded along an axis.

        Queries, keys and values have to be sharded on the sequence dim, `Shard(2)`, when modules
        call it, which follows if all sequences that the model takes are (`sequence`) and the rest
        of it acts on tokens. Static mode refuses it.

        Args:
            path: of modules that call it, with all modules inside them.
            mesh: the axis.
            method: ``"ring"``: keys and values are sent around the ring of ranks, while attention
                over the previous block is computed. ``"all-gather"``: all ranks get all keys and
                values. ``"ulysses"``: heads are sharded instead of the sequence, by all-to-all.
                ``UlyssesRing(degree)``: heads are sharded among that many consecutive ranks, and
                the ring is across these groups.
            order: of the sequence, the same for all entries along this axis. ``"zigzag"`` balances
                causal attention; ``"contiguous"`` is the original order, and what ulysses needs;
                ``"balanced"`` balances the area of each batch's mask, which `attention_mask`
                describes, and is zig-zag without. The default is contiguous for ulysses and zigzag
                otherwise.
            heads: the attribute of the modules, which may be nested as in
                ``"config.num_key_value_heads"``, with the number of key-value heads: for ulysses
                `parallelize` refuses a number that the axis does not divide. Without it the first
                call does.

        Raises:
            ValueError: the path names a tensor, there is no such method, order or axis, ulysses has
                zigzag order, or the axis has no whole number of groups.
        """
        what = f"context({path!r})"
        order = order or ("contiguous" if method == "ulysses" else "zigzag")
        options: dict[str, Any] = {}
        if isinstance(method, UlyssesRing):
            options = {"method": "ulysses-ring", "order": order, "ulysses_degree": method.degree}
        else:
            _check_among(method, get_args(_MethodName), f"{what}: method")
            options = {"method": method, "order": order}
        _check_among(order, get_args(SequenceOrder), f"{what}: order")
        if method == "ulysses" and order != "contiguous":
            raise ValueError(
                f"{what}: method='ulysses' has the whole sequence on every rank, so its work is "
                f"balanced in any order: use order='contiguous', in sequence() too"
            )
        if heads is not None:
            options["heads"] = heads
        return self._add(EntryKind.CONTEXT, path, mesh, Shard(_QUERY_SEQUENCE_DIM), options=options)

    def sequence(
        self,
        path: str,
        mesh: Axes,
        *,
        dim: int = 1,
        order: SequenceOrder = "zigzag",
        shift: str | None = None,
        positions: bool = False,
    ) -> Self:
        """Shards a sequence along an axis, in an order; for an output, restores the order.

        An input has to be replicated along the axis, and becomes `Shard(dim)` without
        communication. Outputs, such as logits, are in the order of the ranks, unless an entry of
        their own restores the order, by one all-to-all.

        Args:
            path: of an input or an output.
            mesh: the axis.
            dim: the sequence dim of the tensor.
            order: ``"zigzag"``: rank r of N has the chunks r and 2 N - 1 - r of 2 N;
                ``"contiguous"``: chunk r of N; ``"balanced"``: chunks by the area of the mask that
                `attention_mask` describes, and those of zig-zag order without.
            shift: for labels: the argument of the same module that takes them shifted by one token,
                as the loss of transformers takes ``shift_labels``. They are shifted before they are
                sharded; the last token has no label (-100).
            positions: whether the tensor has the positions of tokens, which the model's own code
                counts from the length of a sequence. In static mode it counts this rank's tokens,
                and they are moved to where these are in the whole sequence; in Eager nothing
                differs.

        Raises:
            ValueError: the path names no input or output, ``shift`` is given for an output, there
                is no such order or axis, or ``dim`` is negative; ``positions`` is given with an
                output or with ``shift``.
        """
        what = f"sequence({path!r})"
        kind = parse_path(path).kind
        if kind not in (PathKind.INPUT, PathKind.OUTPUT):
            raise ValueError(f"{what}: expected an input or an output, as in '<in:input_ids>'")
        if shift is not None and kind is PathKind.OUTPUT:
            raise ValueError(f"{what}: shift= expected labels, which are an input, got an output")
        _check_among(order, get_args(SequenceOrder), f"{what}: order")
        if positions and (kind is PathKind.OUTPUT or shift is not None):
            raise ValueError(f"{what}: positions= expected an input without shift=, as positions")
        options: dict[str, Any] = {"order": order}
        if shift is not None:
            options["shift"] = shift
        if positions:
            options["positions"] = True
        return self._add(EntryKind.SEQUENCE, path, mesh, Shard(dim), options=options)


def _checked_unit(unit: Unit, what: str) -> int | str | tuple[str, ...]:
    if isinstance(unit, str):
        return unit
    if isinstance(unit, Sequence) and unit and all(isinstance(name, str) for name in unit):
        return tuple(unit)
    if isinstance(unit, bool) or not isinstance(unit, SupportsIndex):
        raise ValueError(f"{what}: unit: expected a size or an attribute's name, got {unit!r}")
    unit = operator.index(unit)
    if unit < 1:
        raise ValueError(f"{what}: unit: expected at least 1, got {unit}")
    return unit


def _check_among(given: str, known: tuple[str, ...], what: str) -> None:
    if given not in known:
        raise ValueError(f"{what}={given!r} must be one of {', '.join(map(repr, known))}")
