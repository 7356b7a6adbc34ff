"""The calls on a plan that cut sequences, and attention over them."""

from __future__ import annotations

from typing import Any, Self

from torch.distributed.tensor import Shard

from plan_api.context_parallel.attend import METHODS, Method
from plan_api.context_parallel.order import ORDERS, OrderName
from plan_api.spec.arguments import Axes
from plan_api.spec.entries import Entries
from plan_api.spec.path import Kind, parse
from plan_api.spec.verb import Verb

__all__ = ["ContextEntries"]

_SEQUENCE = 2  # of queries: (batch, heads, sequence, features)


class ContextEntries(Entries):
    """Context parallelism, said in a plan."""

    def context(
        self,
        path: str,
        mesh: Axes,
        *,
        method: Method = "ring",
        order: OrderName | None = None,
        heads: str | None = None,
    ) -> Self:
        """Computes `scaled_dot_product_attention` over a sequence that is cut along an axis.

        Queries, keys and values are cut by the sequence, `Shard(2)`, when modules call it, which
        they are if all that the model is given is (`sequence`) and the rest of it goes by tokens.
        Static mode knows none of it.

        Args:
            path: of modules that call it, with all that is in them.
            mesh: the axis.
            method: ``"ring"``: keys and values go round, while attention over the block before is
                computed. ``"all-gather"``: all ranks get all keys and values. ``"ulysses"``: heads
                are divided in place of the sequence, by all-to-all.
            order: of the sequence, as that of all entries along this axis. ``"zigzag"`` balances
                causal attention; ``"contiguous"`` is as it comes, and what ulysses needs. By
                default zigzag, and of ulysses contiguous.
            heads: the attribute of the modules, or of a part of them as in
                ``"config.num_key_value_heads"``, that tells the number of key-value heads: with
                ulysses `parallelize` refuses those that the axis does not divide. Without it the
                first call does.

        Raises:
            ValueError: the path names a tensor, or there is no such method, order or axis, or
                ulysses is to be in zigzag order.
        """
        what = f"context({path!r})"
        order = order or ("contiguous" if method == "ulysses" else "zigzag")
        _check_among(method, METHODS, f"{what}: method")
        _check_among(order, ORDERS, f"{what}: order")
        if method == "ulysses" and order != "contiguous":
            raise ValueError(
                f"{what}: method='ulysses' has all of the sequence on every rank, so its work is "
                f"even as it is: use order='contiguous', in sequence() too"
            )
        options: dict[str, Any] = {"method": method, "order": order}
        if heads is not None:
            options["heads"] = heads
        return self._add(Verb.CONTEXT, path, mesh, Shard(_SEQUENCE), options=options)

    def sequence(
        self,
        path: str,
        mesh: Axes,
        *,
        dim: int = 1,
        order: OrderName = "zigzag",
        shift: str | None = None,
    ) -> Self:
        """Cuts a sequence along an axis, in an order; one that a module returns is put back.

        What enters has to be whole on all ranks of the axis, and becomes `Shard(dim)`; nothing is
        sent. What is returned, such as logits, is in the order of the ranks, unless its own entry
        puts it back, which is one all-to-all.

        Args:
            path: of an input or an output.
            mesh: the axis.
            dim: of the tensor, which is the sequence.
            order: ``"zigzag"``: rank r of N has the chunks r and 2 N - 1 - r of 2 N;
                ``"contiguous"``: chunk r of N.
            shift: of labels: the argument of the same module that takes them shifted by one token,
                as the loss of transformers takes ``shift_labels``. They are shifted while they are
                whole; the last token has none (-100).

        Raises:
            ValueError: the path names no input or output, or ``shift`` is of an output; there is no
                such order or axis, or ``dim`` is negative.
        """
        what = f"sequence({path!r})"
        kind = parse(path).kind
        if kind not in (Kind.INPUT, Kind.OUTPUT):
            raise ValueError(f"{what}: names an input or an output, as in '<in:input_ids>'")
        if shift is not None and kind is Kind.OUTPUT:
            raise ValueError(f"{what}: labels to be shifted are given: shift= is of an input")
        _check_among(order, ORDERS, f"{what}: order")
        options = {"order": order} if shift is None else {"order": order, "shift": shift}
        return self._add(Verb.SEQUENCE, path, mesh, Shard(dim), options=options)


def _check_among(given: str, known: tuple[str, ...], what: str) -> None:
    if given not in known:
        raise ValueError(f"{what}={given!r} must be one of {', '.join(map(repr, known))}")
