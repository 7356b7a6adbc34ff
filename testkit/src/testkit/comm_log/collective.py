"""A recorded collective, and its bytes on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Op: TypeAlias = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]


@dataclass(frozen=True)
class Collective:
    """One call of a process group on this rank.

    Attributes:
        op: the operation, with one name for all overloads (`_allgather_base_`, coalesced, ...).
        input_bytes: the bytes of this rank's inputs, over all tensors of the call; 0 for recv and
            for the receivers of a scatter.
        output_bytes: the bytes of this rank's outputs; the same memory as the input for all_reduce,
            broadcast and reduce; 0 for send and for the senders of a gather.
        dtype: of the tensors, such as ``"float32"``; ``"mixed"`` for several, ``""`` for none.
        group: the name of the process group; None if it is unknown, as for collectives that are not
            functional while several groups exist.
        group_size: the number of ranks in the group, or None.
        group_rank: this rank's index in the group, or None.
        root: the root's index in the group (broadcast, reduce, gather, scatter), else None.
        input_splits: of all_to_all, the bytes for each rank of the group; () if unknown.
        output_splits: of all_to_all, the bytes from each rank of the group; () if unknown.
    """

    op: Op
    input_bytes: int
    output_bytes: int
    dtype: str
    group: str | None = None
    group_size: int | None = None
    group_rank: int | None = None
    root: int | None = None
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()

    @property
    def wire_bytes(self) -> int | None:
        """The bytes that this rank sends; None if they need an unknown rank or size of the group.

        By convention they are those of the bandwidth-optimal algorithms for large messages, rings
        and chains without compression, with n ranks, of which i is this one:

        =================  =============================================================
        all_gather         output - input              (n - 1 pieces are forwarded by this rank)
        reduce_scatter     input - output              (likewise)
        all_reduce         2 (n - 1) / n x input       (reduce_scatter, then all_gather)
        all_to_all         input - its own split       (needs i where splits are uneven)
        broadcast          input, 0 for the last of the chain root, root+1, ..., root-1
        reduce             input, 0 for the root       (the same chain backwards)
        scatter            root: input - its piece; others 0
        gather             root: 0; others: input
        send               input;  recv, barrier: 0
        =================  =============================================================

        Summed over a group they are the minimum of any algorithm, all_reduce included.
        """
        n, i = self.group_size, self.group_rank
        match self.op:
            case "all_gather":
                return self.output_bytes - self.input_bytes
            case "reduce_scatter" | "scatter":
                return max(
                    self.input_bytes - self.output_bytes, 0
                )  # other ranks have no input of a scatter
            case "gather":
                return 0 if self.output_bytes else self.input_bytes
            case "send":
                return self.input_bytes
            case "recv" | "barrier":
                return 0
            case "all_reduce":
                return None if n is None else 2 * (n - 1) * self.input_bytes // n
            case "all_to_all" if self.input_splits and len(set(self.input_splits)) == 1:
                return self.input_bytes - self.input_splits[0]
            case "all_to_all":
                if i is None or not self.input_splits:
                    return None
                return self.input_bytes - self.input_splits[i]
            case "broadcast":
                if n is None or i is None or self.root is None:
                    return None
                return 0 if (i - self.root) % n == n - 1 else self.input_bytes
            case "reduce":
                return None if i is None else self.input_bytes * (i != self.root)

    def __str__(self) -> str:
        group = "unknown group" if self.group is None else f"group {self.group}"
        size = "" if self.group_size is None else f" of {self.group_size}"
        return (
            f"{self.op} {self.input_bytes} B -> {self.output_bytes} B "
            f"{self.dtype or 'no tensor'} ({group}{size})"
        )
