"""Communication between the ranks along one axis that is waited for later.

Shards are sent from each rank to each other one directly, so that a rank multiplies what has
arrived while the rest is in flight. The bytes are those of an all-gather or a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import record_function

__all__ = ["Peers", "RowExchange", "RowReduction", "Transfer"]

_ops = torch.ops._c10d_functional


class Transfer:
    """Communication that has begun.

    Args:
        what: it is for, in reports of hangs.
        finish: waits, and returns the result.
    """

    def __init__(self, what: str, finish: Callable[[], torch.Tensor]) -> None:
        self._what, self._finish = what, finish

    def wait(self) -> torch.Tensor:
        """Waits for the result."""
        with record_function("overlap: wait"):
            return self._finish()

    def _waits_for_(self) -> str:
        """Describes the communication to `fused_comm.diagnosis`."""
        return self._what


@dataclass(frozen=True)
class Peers:
    """The ranks along one axis of a mesh.

    Attributes:
        group: their process group.
        rank: this rank's number among them.
        size: how many they are.
        what: what they communicate for, in reports of hangs.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    what: str

    def send_receive(self, sent: torch.Tensor, step: int, received: torch.Tensor) -> Transfer:
        """Sends a tensor to the rank that is ``step`` ahead, and receives from that behind.

        Args:
            sent: contiguous; of the same shape on all ranks.
            step: from 1 on; all ranks call it in one order of steps.
            received: contiguous, of the same shape; is the result.
        """
        ahead, behind = (self.rank + step) % self.size, (self.rank - step) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=ahead),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=behind),
            ]
        )

        def finish() -> torch.Tensor:
            for work in works:
                work.wait()
            return received

        return Transfer(self.what, finish)

    def begin_all_reduce(self, tensor: torch.Tensor) -> Transfer:
        """Begins to sum a contiguous tensor, in place."""
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None

        def finish() -> torch.Tensor:
            work.wait()
            return tensor

        return Transfer(self.what, finish)

    def begin_reduce_scatter(self, tensor: torch.Tensor, dim: int) -> Transfer:
        """Begins to sum a tensor and to shard it evenly on a dim."""
        rows = tensor.contiguous() if dim == 0 else torch.cat(tensor.chunk(self.size, dim))
        sent = _ops.reduce_scatter_tensor(rows, "sum", self.size, self.group.group_name)
        return Transfer(self.what, lambda: _ops.wait_tensor(sent))


class RowExchange:
    """An all-gather whose shards are used one by one, as they arrive.

    Args:
        shard: this rank's; of the same shape on all ranks.
        rows: views of the gathered tensor, by rank, which are filled.
        peers: the ranks.
    """

    def __init__(self, shard: torch.Tensor, rows: Sequence[torch.Tensor], peers: Peers) -> None:
        self._own, self._rows, self._peers = shard.contiguous(), rows, peers
        self._transfers = []
        for step in range(1, peers.size):
            part = rows[(peers.rank - step) % peers.size]
            received = part if part.is_contiguous() else torch.empty_like(self._own)
            self._transfers.append(peers.send_receive(self._own, step, received))

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields each rank's number and shard, this rank's first."""
        rank = self._peers.rank
        self._rows[rank].copy_(self._own)
        yield rank, self._own
        for step, transfer in enumerate(self._transfers, 1):
            source, shard = (rank - step) % self._peers.size, transfer.wait()
            if shard is not self._rows[source]:
                self._rows[source].copy_(shard)
            yield source, shard


class RowReduction:
    """A reduce-scatter whose terms are sent one by one, as they are computed.

    They are summed in the order of a ring that ends at this rank, as gloo does, whichever arrives
    first: so the sum has the bits of gloo's reduce-scatter.

    Args:
        peers: the ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers, self._transfers = peers, list[Transfer]()

    def destinations(self) -> Iterator[int]:
        """Yields the ranks in the order in which their terms are sent, without this one."""
        for step in range(1, self._peers.size):
            yield (self._peers.rank + step) % self._peers.size

    def send(self, term: torch.Tensor) -> None:
        """Sends a term to the next of `destinations`."""
        step, sent = len(self._transfers) + 1, term.contiguous()
        received = torch.empty_like(sent)
        self._transfers.append(self._peers.send_receive(sent, step, received))

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """Waits for the terms of the other ranks, and returns their sum with this rank's."""
        if not self._transfers:
            return own.clone()
        first, *others = self._transfers
        result = first.wait()
        for transfer in others:
            result += transfer.wait()
        return result.add_(own)
