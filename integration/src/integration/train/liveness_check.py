"""Who of the others is still there, asked when a collective has failed.

gloo says that it waited too long, or that a connection was closed: not which host is gone. Every
rank therefore keeps a socket that listens, and nothing else. The kernel answers for a process that
lives, also for one that stands still; it refuses for one that has ended; and where nothing
answers, the host or the way to it is gone.
"""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch.distributed as dist

from integration.train.addresses import address_towards
from integration.train.rendezvous import ranks, rendezvous_endpoint
from integration.train.store_client import first_line
from integration.train.world import World

_ANSWER_SECONDS = 3.0


class LostRanksError(RuntimeError):
    """Other ranks are gone; the message names them and their hosts."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs and listens."""

    rank: int
    machine: str
    address: str
    port: int

    @property
    def host(self) -> str:
        """The host, for people."""
        return f"{self.address} ({self.machine})"


class LivenessCheck:
    """Knows where all ranks are; all of them construct it together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._listener = socket.create_server(("", 0), backlog=max(world.size, 128))
        address = address_towards(rendezvous_endpoint()) or "127.0.0.1"
        port = self._listener.getsockname()[1]
        self._places: list[Place] = [Place(0, "", "", 0)] * world.size
        dist.all_gather_object(self._places, Place(world.rank, socket.gethostname(), address, port))

    def explain(self, error: BaseException) -> LostRanksError | None:
        """Returns who is gone if ``error`` is of a collective and someone is."""
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            return None
        missing = self._missing()
        if not missing:
            return None
        return LostRanksError(
            f"rank {self._world.rank} of {self._world.size} stopped: {'; '.join(missing)}"
            f" ({first_line(error)}); start all ranks again, and they resume from the newest"
            " checkpoint"
        )

    def _missing(self) -> list[str]:
        hosts: dict[str, list[Place]] = {}
        for place in self._places:
            if place.rank != self._world.rank:
                hosts.setdefault(place.host, []).append(place)
        with ThreadPoolExecutor(min(len(hosts), 64)) as pool:
            sentences = pool.map(_absence, hosts.values())
        return [sentence for sentence in sentences if sentence is not None]


def _absence(places: Sequence[Place]) -> str | None:
    """Says which of the ranks of one host are gone, if any."""
    ended = []
    for place in places:
        try:
            socket.create_connection((place.address, place.port), timeout=_ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            ended.append(place.rank)
        except OSError:
            lost = ranks(each.rank for each in places)
            return f"the host of {lost}, {place.host}, does not answer"
    return f"{ranks(ended)} on {places[0].host} ended" if ended else None
