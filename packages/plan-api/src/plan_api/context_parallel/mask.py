"""Describes which keys each query of an attention attends to, without a matrix of both.

The keys of a query are a range of positions: up to the query (causal), near it (a sliding window),
in its document (packed sequences), without padding at the ends, or an intersection of these, which
is a range again. The starts and stops of the ranges do not decrease along the sequence. Everything
else follows from these two facts: whether a block of queries and keys is empty, full or partial
(`plan_api.context_parallel.tiles`), and how much work a token is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Self

import torch

from plan_api._compat import on_host
from plan_api.context_parallel.block_mask import BLOCK_SIZE, block_mask_of_ranges

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["AttentionMask", "KeyRanges", "key_ranges"]


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query attends to; without options all.

    It is data of the host, equal on all ranks of a sequence, and can be hashed. Masks are
    intersected by ``&``. Padding attends to nothing, and nothing attends to it.

    Attributes:
        causal: each query attends to the keys up to itself.
        window: each query attends to keys that are fewer than this number of tokens away; under
            ``causal`` to itself and the ``window - 1`` tokens before. transformers'
            ``sliding_window`` of causal models is this number.
        documents: for each row of the batch, or once for all, the positions at which documents
            begin, and the length: ``(0, 5, 12)`` are two documents, of 5 and 7 tokens. Each query
            attends to keys of its document.
        tokens: for each row of the batch, or once for all, the positions that are not padding,
            from the first up to, and without, the second.
    """

    causal: bool = False
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    tokens: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        """Checks the options.

        Raises:
            ValueError: an option is out of range; rows are not as many in both.
        """
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"AttentionMask: expected a window of at least 1 token, got {self.window}; leave "
                f"it out for attention to all"
            )
        for row, edges in enumerate(self.documents or ()):
            _check_documents(edges, row)
        for row, (start, stop) in enumerate(self.tokens or ()):
            if not 0 <= start <= stop:
                raise ValueError(
                    f"AttentionMask: expected tokens from a first position up to a later one in "
                    f"row {row}, got {(start, stop)}"
                )
        rows = {len(one) for one in (self.documents, self.tokens) if one is not None} - {1}
        if len(rows) > 1 or 0 in rows:
            raise ValueError(
                f"AttentionMask: expected documents and tokens for one row of the batch or for "
                f"all, got {len(self.documents or ())} and {len(self.tokens or ())} rows"
            )

    @classmethod
    def of_lengths(cls, lengths: Iterable[int], *, causal: bool = True) -> Self:
        """Returns the mask of documents with these lengths, in every row of the batch."""
        return cls(causal, documents=((0, *accumulate(int(one) for one in lengths)),))

    @classmethod
    def of_cumulative_lengths(cls, edges: Iterable[Any], *, causal: bool = True) -> Self:
        """Returns the mask of documents in one row, as ``cu_seqlens`` of flash attention.

        Args:
            edges: where documents begin, from 0, and the length; integers or an int tensor.
            causal: as of the class.
        """
        return cls(causal, documents=(tuple(int(one) for one in edges),))

    @classmethod
    def of_document_ids(cls, ids: torch.Tensor, *, causal: bool = True) -> Self:
        """Returns the mask of documents by the number of each token's document.

        Args:
            ids: integers of (sequence) or (batch, sequence), that do not decrease along it.
            causal: as of the class.

        Raises:
            ValueError: ids go back.
        """
        rows = ids.detach().reshape(-1, ids.shape[-1]).cpu()
        steps = rows.diff(dim=-1)
        if steps.lt(0).any():
            row, place = steps.lt(0).nonzero()[0].tolist()
            raise ValueError(
                f"AttentionMask: expected ids of documents that do not decrease along the "
                f"sequence, got {rows[row, place + 1]} after {rows[row, place]} at position "
                f"{place + 1} of row {row}; put the tokens of a document next to each other"
            )
        return cls(causal, documents=_edges(steps.ne(0)))

    @classmethod
    def of_position_ids(cls, position_ids: torch.Tensor, *, causal: bool = True) -> Self:
        """Returns the mask of documents that begin where positions do not go up by one.

        These are the documents of transformers' ``find_packed_sequence_indices``.

        Args:
            position_ids: integers of (batch, sequence).
            causal: as of the class.
        """
        rows = position_ids.detach().reshape(-1, position_ids.shape[-1]).cpu()
        edges = _edges(rows.diff(dim=-1).ne(1))
        if all(len(row) == 2 for row in edges):
            return cls(causal)
        return cls(causal, documents=edges)

    @classmethod
    def of_padding(cls, attention_mask: torch.Tensor, *, causal: bool = True) -> Self:
        """Returns the mask without padding at the ends of the rows.

        Args:
            attention_mask: (batch, sequence) of bool or integers, nonzero for tokens.
            causal: as of the class.

        Raises:
            ValueError: there is padding between tokens of a row.
        """
        rows = attention_mask.detach().reshape(-1, attention_mask.shape[-1]).cpu().ne(0)
        tokens = []
        for number, row in enumerate(rows):
            found = row.nonzero().flatten().tolist()
            start, stop = (found[0], found[-1] + 1) if found else (0, 0)
            if stop - start != len(found):
                raise ValueError(
                    f"AttentionMask: expected padding at the ends of row {number} only, got "
                    f"padding between positions {start} and {stop - 1}; pad at the end"
                )
            tokens.append((start, stop))
        if all(one == (0, rows.shape[1]) for one in tokens):
            return cls(causal)
        return cls(causal, tokens=tuple(tokens))

    @classmethod
    def of_inputs(
        cls,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        causal: bool = True,
    ) -> Self:
        """Returns the mask that a transformers model makes of its inputs, but for windows.

        As there, positions tell documents only if there is no mask of padding.

        Args:
            attention_mask: (batch, sequence), as of `of_padding`.
            position_ids: (batch, sequence), as of `of_position_ids`.
            causal: as of the class.

        Raises:
            ValueError: the attention mask is no mask of padding, (batch, sequence), at the ends.
        """
        if attention_mask is not None:
            if attention_mask.ndim != 2:
                raise ValueError(
                    f"AttentionMask: expected an attention_mask of padding, (batch, sequence), "
                    f"got {tuple(attention_mask.shape)}; describe it as an AttentionMask"
                )
            return cls.of_padding(attention_mask, causal=causal)
        if position_ids is not None:
            return cls.of_position_ids(position_ids, causal=causal)
        return cls(causal)

    @property
    def is_plain(self) -> bool:
        """Whether it is causal or full attention and nothing else."""
        return self.window is None and self.documents is None and self.tokens is None

    @property
    def rows(self) -> int:
        """The number of rows of the batch that it distinguishes; 1: all have the same mask."""
        return max(len(self.documents or ((),)), len(self.tokens or ((),)))

    def row(self, number: int) -> Self:
        """Returns the mask of one row of the batch."""
        documents, tokens = self.documents, self.tokens
        return replace(
            self,
            documents=documents and (documents[number if len(documents) > 1 else 0],),
            tokens=tokens and (tokens[number if len(tokens) > 1 else 0],),
        )

    def __and__(self, other: Self) -> Self:
        """Returns the mask of keys that both attend to.

        Raises:
            ValueError: they are masks of different numbers of rows or tokens.
        """
        windows = [one.window for one in (self, other) if one.window is not None]
        documents = _by_row(self.documents, other.documents, _merged_documents)
        tokens = _by_row(self.tokens, other.tokens, _merged_tokens)
        return type(self)(
            self.causal or other.causal, min(windows, default=None), documents, tokens
        )

    def check(self, length: int, batch: int | None, where: str) -> None:
        """Checks that it is the mask of a sequence.

        Args:
            length: of the global sequence.
            batch: the number of rows; None: is not checked.
            where: the module, for messages.

        Raises:
            ValueError: documents or tokens are longer or shorter than the sequence, or there are
                other rows.
        """
        for row, edges in enumerate(self.documents or ()):
            if edges[-1] != length:
                raise ValueError(
                    f"{where}: expected documents of {length} tokens together, the length of the "
                    f"sequence, got {edges[-1]} in row {row}; "
                    + ("shorten them" if edges[-1] > length else "make a document of the rest")
                )
        for row, (_, stop) in enumerate(self.tokens or ()):
            if stop > length:
                raise ValueError(
                    f"{where}: expected tokens in a sequence of {length}, got tokens up to "
                    f"{stop} in row {row}; make the mask of this sequence"
                )
        if batch is not None and self.rows not in (1, batch):
            raise ValueError(
                f"{where}: expected a mask of one row or of {batch}, the batch of this rank, got "
                f"{self.rows} rows; take the rows of this rank's part of the batch"
            )

    def area(self, length: int) -> int:
        """Returns the number of pairs of a query and a key, summed over its rows.

        Raises:
            ValueError: it is not the mask of a sequence of this length, as in `check`.
        """
        self.check(length, None, "area")
        return sum(key_ranges(self.row(row), length).area for row in range(self.rows))

    def block_mask(
        self, length: int, device: torch.device, *, block_size: int = BLOCK_SIZE
    ) -> BlockMask:
        """Converts it to the block mask of `torch.nn.attention.flex_attention`.

        Args:
            length: of the sequence.
            device: of the attention; FlexAttention has no backward on a CPU.
            block_size: the number of queries, and of keys, of a block.

        Returns:
            the mask of all rows, for any number of heads.

        Raises:
            ValueError: as in `area`.
        """
        self.check(length, None, "block_mask")
        start, stop = (one.to(device) for one in self._ranges(length))
        return block_mask_of_ranges(start, stop, length, block_size)

    def dense(self, length: int) -> torch.Tensor:
        """Returns the mask as a bool tensor of (rows, 1, length, length), true where attended.

        Raises:
            ValueError: as in `area`.
        """
        self.check(length, None, "dense")
        start, stop = (one[:, None, :, None] for one in self._ranges(length))
        keys = torch.arange(length)
        return (keys >= start) & (keys < stop)

    def _ranges(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the bounds of the keys of each query: (rows, length)."""
        ranges = [key_ranges(self.row(row), length) for row in range(self.rows)]
        start, stop = ([getattr(one, name) for one in ranges] for name in ("start", "stop"))
        return torch.tensor(start), torch.tensor(stop)


@dataclass(frozen=True)
class KeyRanges:
    """The range of keys of each query of a row; neither bound decreases.

    Attributes:
        start: position of the first key, by query.
        stop: behind the last key, by query; the start where there is none.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def area(self) -> int:
        """The number of pairs of a query and a key."""
        return sum(self.stop) - sum(self.start)


@lru_cache(maxsize=64)
@on_host
def key_ranges(mask: AttentionMask, length: int) -> KeyRanges:
    """Returns the keys of each query of a sequence, by positions.

    Args:
        mask: of one row.
        length: of the sequence.
    """
    position = torch.arange(length)
    start, stop = torch.zeros_like(position), torch.full_like(position, length)
    if mask.documents is not None:
        edges = torch.tensor(mask.documents[0])
        start, stop = (one.repeat_interleave(edges.diff()) for one in (edges[:-1], edges[1:]))
    if mask.window is not None:
        start = start.maximum(position - mask.window + 1)
        stop = stop.minimum(position + mask.window)
    if mask.causal:
        stop = stop.minimum(position + 1)
    if mask.tokens is not None:
        ((first, last),) = mask.tokens
        start, stop = start.clamp(first, last), stop.clamp(first, last)
        start[last:] = last  # padding behind attends to nothing; so does padding before
        stop[:first] = first
        start[:first] = first
    return KeyRanges(tuple(start.tolist()), tuple(stop.maximum(start).tolist()))


def _check_documents(edges: Sequence[int], row: int) -> None:
    if len(edges) < 2 or edges[0] != 0:
        raise ValueError(
            f"AttentionMask: expected documents from position 0 on to the length in row {row}, "
            f"got {tuple(edges[:4])}"
        )
    for number, (start, stop) in enumerate(pairwise(edges)):
        if stop == start:
            raise ValueError(
                f"AttentionMask: expected documents of at least one token, got an empty one, "
                f"number {number} of row {row}, at position {start}; leave it out"
            )
        if stop < start:
            raise ValueError(
                f"AttentionMask: expected documents that begin in ascending order, got one at "
                f"{stop} after one at {start} in row {row}"
            )


def _edges(begins: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Returns where documents begin, from whether each token but the first begins one."""
    return tuple((0, *(row.nonzero().flatten() + 1).tolist(), len(row) + 1) for row in begins)


def _by_row(one: Any, other: Any, merge: Any) -> Any:
    if one is None or other is None:
        return one or other
    rows = max(len(one), len(other))
    if {len(one), len(other)} - {1, rows}:
        raise ValueError(
            f"AttentionMask: expected masks of one row or of as many rows, got {len(one)} and "
            f"{len(other)}"
        )
    return tuple(
        merge(one[row if len(one) > 1 else 0], other[row if len(other) > 1 else 0])
        for row in range(rows)
    )


def _merged_documents(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    if one[-1] != other[-1]:
        raise ValueError(
            f"AttentionMask: expected documents of one sequence, got {one[-1]} and {other[-1]} "
            f"tokens"
        )
    return tuple(sorted({*one, *other}))


def _merged_tokens(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))
