"""The messages between the parent and its ranks.

Parent to rank: `RankCall`, then `DestroyGroup` when every rank has replied (a rank that destroyed
its process group earlier would break the connections of slower ranks). Rank to parent: `Ready` at
the start and after each `DestroyGroup`, and one `Reply` per call. Each is one pickle on a socket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WarningFilter:
    """One entry of `warnings.filters`, as the arguments of `warnings.filterwarnings`."""

    action: str
    message: str
    category: type[Warning]
    module: str
    lineno: int


@dataclass(frozen=True)
class StartRank:
    """To the fork server, with the file descriptor of the rank's connection: start this rank.

    Attributes:
        rank: its number in every call.
        store_port: of the parent's TCPStore, on the loopback device.
    """

    rank: int
    store_port: int


@dataclass(frozen=True)
class RankCall:
    """One function to run.

    Attributes:
        number: of the call, a prefix of its keys in the store.
        world_size: the number of ranks.
        sys_path: the parent's.
        payload: cloudpickle of a `Task`, separate because it can only be loaded with `sys_path`.
    """

    number: int
    world_size: int
    sys_path: tuple[str, ...]
    payload: bytes


@dataclass(frozen=True)
class Task:
    """The payload of a call.

    Attributes:
        start_device: makes a device the rank's, and returns the backends of the process group;
            None for gloo.
    """

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    warning_filters: tuple[WarningFilter, ...]
    start_device: Callable[[int], str] | None = None


@dataclass(frozen=True)
class Ready:
    """The rank waits for a call: it has imported torch, or destroyed its last process group."""


@dataclass(frozen=True)
class Reply:
    """The result of a call on this rank.

    Attributes:
        payload: cloudpickle of the result; None if the call failed.
        failure: the traceback, or "".
    """

    payload: bytes | None
    failure: str = ""


@dataclass(frozen=True)
class DestroyGroup:
    """Every rank has replied: destroy the process group."""
