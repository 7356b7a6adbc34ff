"""A sum over ranks whose rows arrive in blocks, and what a model computes from it row by row.

Note: without sequence parallelism a sum behind a Linear is used at once: it is added to the hidden
states, normalised and multiplied. So the last block that was sent would be waited for with nothing
to compute. `RowsInFlight` is such a sum before it has arrived. As torch's AsyncCollectiveTensor it
is waited for at its first use, but block by block: what operators compute of each row by itself
they compute when another operator needs these rows. The products of the next site take the blocks
one by one, so that the last one arrives beside them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["ArrivingRows", "BlocksOfTensor", "RowsInFlight", "block_lengths", "rows_of"]

_aten = torch.ops.aten
_ALIASES = frozenset({_aten.detach.default, _aten.alias.default, _aten.view.default})
# What adds to and normalises hidden states row by row, and what computes it into given memory.
# Torch's tag of pointwise operators does not tell: `equal` has it.
_BY_ROWS = {
    _aten._to_copy.default: None,
    _aten.add.Scalar: _aten.add.Scalar_out,
    _aten.add.Tensor: _aten.add.out,
    _aten.div.Tensor: _aten.div.out,
    _aten.mean.dim: _aten.mean.out,
    _aten.mul.Tensor: _aten.mul.out,
    _aten.native_layer_norm.default: None,
    _aten.neg.default: _aten.neg.out,
    _aten.pow.Tensor_Scalar: _aten.pow.Tensor_Scalar_out,
    _aten.reciprocal.default: _aten.reciprocal.out,
    _aten.rsqrt.default: _aten.rsqrt.out,
    _aten.sqrt.default: _aten.sqrt.out,
    _aten.sub.Tensor: _aten.sub.out,
    _aten._fused_rms_norm.default: None,
}
# torch.nn.RMSNorm adds its eps in place.
_IN_PLACE = {_aten.add_.Scalar: _aten.add.Scalar}
# Their second argument has the sizes of the dims that they normalise.
_NORMS = frozenset({_aten.native_layer_norm.default, _aten._fused_rms_norm.default})


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor (..., features) as a view (rows, features)."""
    return tensor.view(-1, tensor.shape[-1])


def block_lengths(tensor: torch.Tensor, count: int) -> list[int]:
    """Returns the numbers of rows of at most as many blocks of (almost) equal length."""
    rows = tensor.shape[:-1].numel()
    length = max(1, -(-rows // count))
    return [min(length, rows - start) for start in range(0, max(rows, 1), length)]


def _split(tensor: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return torch.split(rows_of(tensor), [*lengths])


class ArrivingRows:
    """Tensors that are filled block by block.

    Args:
        tensors: contiguous, (..., features), of the same number of rows.
        lengths: the number of rows of each block.
        fill: fills the rows of a block by its number; called once for each, in order.

    Attributes:
        tensors: of which some blocks may not have been filled.
        lengths: the number of rows of each block.
        has_aliases: whether several tensors refer to one of these.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        lengths: Sequence[int],
        fill: Callable[[int], object],
    ) -> None:
        self.tensors, self.lengths = tuple(tensors), lengths
        self.has_aliases = False
        self._blocks = [_split(tensor, lengths) for tensor in tensors]
        self._fill: Callable[[int], object] | None = fill
        self._filled = 0
        self._users: list[weakref.ref[ArrivingRows]] = []

    @property
    def are_all_filled(self) -> bool:
        """Whether no block is waited for."""
        return self._fill is None

    def add_user(self, user: ArrivingRows) -> None:
        """Takes note of rows that are computed from these, and may be so later."""
        self._users.append(weakref.ref(user))

    def block(self, output: int, number: int | None) -> torch.Tensor:
        """Waits for a block, and returns its rows of one of the tensors; for None no rows."""
        if number is None:
            return self._blocks[output][0][:0]
        if self._filled <= number:
            self._wait(number + 1)
        return self._blocks[output][number]

    def unfilled(self, number: int) -> list[torch.Tensor]:
        """Returns the rows of a block of all tensors, to be filled."""
        return [blocks[number] for blocks in self._blocks]

    def wait(self) -> None:
        """Waits for all blocks, and for what is computed from them: they may be changed then."""
        if self._fill is not None:
            self._wait(len(self.lengths))
        users, self._users = self._users, []
        for user in users:
            alive = user()
            if alive is not None:
                alive.wait()

    def _wait(self, count: int) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._wait(count)
        while self._filled < count:
            assert self._fill is not None
            self._fill(self._filled)
            self._filled += 1
        if self._filled == len(self.lengths):
            self._fill = None  # and what it refers to
        return None


class RowsInFlight(torch.Tensor):
    """A tensor of `ArrivingRows`, which has no memory of its own.

    Args:
        arriving: it and other tensors.
        output: its number among them.
    """

    arriving: ArrivingRows
    output: int

    @staticmethod
    def __new__(cls: Any, arriving: ArrivingRows, output: int = 0) -> RowsInFlight:
        """Makes the tensor."""
        of = arriving.tensors[output]
        made: RowsInFlight = torch.Tensor._make_wrapper_subclass(
            cls, of.shape, strides=of.stride(), dtype=of.dtype, device=of.device
        )
        made.arriving, made.output = arriving, output
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator: on each block by itself, or on what has arrived as a whole."""
        kwargs = kwargs or {}
        if func in _ALIASES:
            (of, *_) = args
            if not of.arriving.are_all_filled and (len(args) == 1 or args[1] == [*of.shape]):
                of.arriving.has_aliases = True
                return RowsInFlight(of.arriving, of.output)
        elif func in _IN_PLACE and not args[0].arriving.has_aliases:
            changed = _by_blocks(_IN_PLACE[func], args, kwargs)
            if changed is not None:
                args[0].arriving, args[0].output = changed.arriving, changed.output
                return args[0]
        elif func in _BY_ROWS:
            result = _by_blocks(func, args, kwargs)
            if result is not None:
                return result
        leaves, spec = tree_flatten((args, kwargs))
        rows = [one for one in leaves if isinstance(one, RowsInFlight)]
        plain = [one.whole() if isinstance(one, RowsInFlight) else one for one in leaves]
        plain_args, plain_kwargs = tree_unflatten(plain, spec)
        result = func(*plain_args, **plain_kwargs)
        # An operator in place returns its argument.
        return next((one for one in rows if result is one.whole()), result)

    def whole(self) -> torch.Tensor:
        """Waits for all blocks, and returns the plain tensor."""
        self.arriving.wait()
        return self.arriving.tensors[self.output]

    def in_blocks(self) -> Iterator[torch.Tensor]:
        """Waits for one block after another, and yields its rows."""
        for number in range(len(self.arriving.lengths)):
            yield self.arriving.block(self.output, number)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RowsInFlight({self.whole()!r})"


def _by_blocks(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns an operator's results, whose blocks are computed when they are needed.

    Returns:
        None if it does not compute each row by itself, of rows that are in flight.
    """
    pending = [
        one for one in args if isinstance(one, RowsInFlight) and not one.arriving.are_all_filled
    ]
    if not pending or kwargs.get("memory_format") is not None:
        return None
    first, lengths = pending[0], pending[0].arriving.lengths
    if func is _aten.mean.dim:
        if args[1] not in ([-1], [first.ndim - 1]) or args[2:] != (True,):
            return None
        args = (first, [-1], True)  # also of a block, which has two dims
    elif func in _NORMS and len(args[1]) != 1:
        return None
    if any(one.arriving.lengths is not lengths for one in pending):
        return None
    blocks_of = [_blocks_of(one, first) for one in args]
    if None in blocks_of:
        return None

    def fill(number: int) -> None:
        blocks = [block(number) for block in blocks_of]  # type: ignore[misc]
        targets, into = arriving.unfilled(number), _BY_ROWS[func]
        if into is not None:
            into(*blocks, **kwargs, out=targets[0])
            return
        for target, block in zip(targets, _tuple(func(*blocks, **kwargs)), strict=True):
            target.copy_(block)

    # The dtypes and features of the results are those of no rows.
    empty = _tuple(func(*(block(None) for block in blocks_of), **kwargs))  # type: ignore[misc]
    tensors = [one.new_empty((*first.shape[:-1], one.shape[-1])) for one in empty]
    arriving = ArrivingRows(tensors, lengths, fill)
    for one in pending:
        one.arriving.add_user(arriving)
    results = tuple(RowsInFlight(arriving, number) for number in range(len(tensors)))
    return results if len(results) > 1 else results[0]


def _tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _blocks_of(argument: Any, first: RowsInFlight) -> Callable[[int | None], Any] | None:
    """Returns what gives a block of an argument by number, which may be the same for all.

    Returns:
        None if the argument has no such rows. For the number None it has no rows.
    """
    if not isinstance(argument, torch.Tensor):
        return lambda number: argument
    if argument.ndim == first.ndim and argument.shape[:-1] == first.shape[:-1]:
        if isinstance(argument, RowsInFlight):
            # Now: what computes in place gives the tensor other rows.
            return partial(argument.arriving.block, argument.output)
        if argument.is_contiguous() and not argument.is_inference():
            return BlocksOfTensor(argument, first.arriving.lengths)
    elif argument.ndim <= 1 and not isinstance(argument, RowsInFlight):
        copied = argument.clone()  # of a weight, which fully_shard may free before the last block
        return lambda number: copied
    return None


class BlocksOfTensor:
    """The blocks of rows of a plain tensor, which may not change before the last one is used.

    Args:
        tensor: contiguous, (..., features).
        lengths: the number of rows of each block.
    """

    def __init__(self, tensor: torch.Tensor, lengths: Sequence[int]) -> None:
        self._tensor, self._version = tensor, _version(tensor)
        self._blocks = _split(tensor, lengths)

    def __call__(self, number: int | None) -> torch.Tensor:
        """Returns a block by number; no rows for None.

        Raises:
            RuntimeError: the tensor has changed in place.
        """
        if number is None:
            return self._blocks[0][:0]
        if _version(self._tensor) != self._version:
            raise RuntimeError(
                f"overlap=: a tensor of shape {[*self._tensor.shape]} was changed in place before "
                f"what is computed from it and from a sum over ranks was used; change a copy of "
                f"it, or call parallelize without overlap="
            )
        return self._blocks[number]


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
