"""Sums over ranks whose terms are sent in a narrower dtype than they are added in.

Each rank rounds its terms, sends every rank those of that rank's part, and adds what it receives in
the dtype of the tensor, in the order of the ranks. So each term is rounded once, the sums have the
same bits wherever a part is, and half or a quarter of the bytes are sent; a collective in the
narrow dtype rounds partial sums, too. An all-reduce rounds the sums once more, to return them.

Float8 numbers have a scale for each block of 128, a power of two in one more byte: a row of rank r
is padded to whole blocks, so that blocks are those of one part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fused_comm import _compat

__all__ = [
    "BLOCK", "NARROW_DTYPES", "NarrowSum", "SendDtype", "checked_send_dtype", "narrow_all_reduce",
    "narrow_reduce_scatter", "send_dtype_of",
]  # fmt: skip

BLOCK = 128  # elements of a float8 block
_EXPONENTS = (-126, 126)  # of scales
_NOT_FINITE = -128  # in place of an exponent: all numbers of the block are NaN
NARROW_DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

# For all axes, or by the name or number of an axis.
SendDtype: TypeAlias = "torch.dtype | Mapping[str | int, torch.dtype] | None"


def checked_send_dtype(what: str, given: SendDtype) -> SendDtype:
    """Returns the dtypes in which terms are sent.

    Args:
        what: begins the message.
        given: by a caller.

    Raises:
        ValueError: one is none of `NARROW_DTYPES`.
    """
    dtypes = [*given.values()] if isinstance(given, Mapping) else [given] if given else []
    for dtype in dtypes:
        if dtype not in NARROW_DTYPES:
            known = ", ".join(map(str, NARROW_DTYPES))
            raise ValueError(
                f"{what}: send_dtype: expected one of {known}, or a mapping from axes to these, "
                f"got {dtype!r}; leave it out to send the dtype of the sums"
            )
    return given


def send_dtype_of(send: SendDtype, axis: int, name: str | None = None) -> torch.dtype | None:
    """Returns the dtype in which terms are sent along an axis; None: that of the sums."""
    if not isinstance(send, Mapping):
        return send
    return send.get(name, send.get(axis)) if name is not None else send.get(axis)


class NarrowSum:
    """A sum that is being made.

    Args:
        steps: each waits for what the one before has started, and starts the next; the last one
            writes the result.
        work: what has been started.
    """

    def __init__(self, work: dist.Work, steps: Sequence[Callable[[], dist.Work | None]]) -> None:
        self._work: dist.Work | None = work
        self._steps = [*steps]

    def wait(self) -> None:
        """Waits, and writes the result; all ranks call it in the same order."""
        while self._work is not None:
            self._work.wait()
            self._work = self._steps.pop(0)()


def narrow_reduce_scatter(
    output: torch.Tensor, tensor: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup
) -> NarrowSum:
    """Starts a reduce-scatter whose terms are sent in another dtype.

    Args:
        output: (row,), written by `NarrowSum.wait`; may be a part of ``tensor``.
        tensor: (ranks * row,), floating-point, which is read before this returns.
        dtype: one of `NARROW_DTYPES`.
        group: of the ranks; row r is that of its rank r.
    """
    received, work = _exchange(tensor.view(group.size(), -1), dtype, group)

    def finish() -> None:
        output.copy_(_sum(received, output.numel(), dtype, tensor.dtype))

    return NarrowSum(work, [finish])


def narrow_all_reduce(
    tensor: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup
) -> NarrowSum:
    """Starts an all-reduce whose terms and sums are sent in another dtype.

    Args:
        tensor: (numel,), floating-point; `NarrowSum.wait` writes the sums, the same on all ranks.
        dtype: one of `NARROW_DTYPES`.
        group: of the ranks.
    """
    ranks, numel = group.size(), tensor.numel()
    row = -(-numel // ranks)
    row = -(-row // BLOCK) * BLOCK if dtype.itemsize == 1 else row
    rows = F.pad(tensor, (0, row * ranks - numel)).view(ranks, row)
    received, work = _exchange(rows, dtype, group)
    gathered = torch.empty_like(received)

    def send_sums() -> dist.Work:
        own = _narrowed(_sum(received, row, dtype, tensor.dtype).view(1, -1), dtype)
        return _compat.all_gather(gathered.view(-1), own.view(-1), group)

    def finish() -> None:
        tensor.copy_(_widened(gathered, row, dtype, tensor.dtype).view(-1)[:numel])

    return NarrowSum(work, [send_sums, finish])


def _exchange(
    rows: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work]:
    sent = _narrowed(rows, dtype)
    received = torch.empty_like(sent)
    return received, _compat.all_to_all(received.view(-1), sent.view(-1), group)


def _sum(
    received: torch.Tensor, row: int, dtype: torch.dtype, sum_dtype: torch.dtype
) -> torch.Tensor:
    """Returns (row,): the sum of the ranks' terms, in their order, in at least float32."""
    wide = torch.promote_types(sum_dtype, torch.float32)
    total = _widened(received[:1], row, dtype, wide)[0]
    for one in received[1:]:
        total += _widened(one.view(1, -1), row, dtype, wide)[0]
    return total


def _narrowed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows as they are sent: (rows, columns) of bfloat16, or of bytes, scales behind."""
    if dtype.itemsize > 1:
        return rows.to(dtype)
    numbers = F.pad(rows, (0, -rows.shape[1] % BLOCK)).view(len(rows), -1, BLOCK)
    most = numbers.abs().amax(-1)
    # The least exponent with which most <= largest * 2 ** exponent.
    _, exponents = torch.frexp(most / torch.finfo(dtype).max)
    finite = most.isfinite() & (exponents <= _EXPONENTS[1])
    exponents = exponents.clamp(*_EXPONENTS)
    payload = torch.ldexp(numbers, -exponents.unsqueeze(-1)).to(dtype).flatten(1)
    scales = torch.where(finite, exponents, _NOT_FINITE).to(torch.int8)
    return torch.cat([payload.view(torch.uint8), scales.view(torch.uint8)], 1)


def _widened(sent: torch.Tensor, row: int, dtype: torch.dtype, wide: torch.dtype) -> torch.Tensor:
    """Returns (rows, row): what `_narrowed` was given, rounded."""
    if dtype.itemsize > 1:
        return sent.to(wide)
    blocks = sent.shape[1] // (BLOCK + 1)
    payload, exponents = sent.split([blocks * BLOCK, blocks], 1)
    numbers = payload.contiguous().view(dtype).to(wide).view(len(sent), blocks, BLOCK)
    exponents = exponents.contiguous().view(torch.int8).to(torch.int32)
    scales = torch.ldexp(torch.ones(exponents.shape, dtype=wide, device=sent.device), exponents)
    scales.masked_fill_(exponents == _NOT_FINITE, torch.nan)
    wide_rows: torch.Tensor = numbers * scales.unsqueeze(-1)
    return wide_rows.flatten(1)[:, :row]
