"""Finds the lost ranks after a collective has failed.

gloo reports a timeout or a closed connection, but not which host is lost. Every rank therefore has
a listening socket. The kernel accepts connections for a running process, even if it hangs, and
refuses them for one that has ended; if there is no answer, the host or its network is down.
"""

import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch.distributed as dist

from integration.train.launch.endpoint import address_towards, endpoint_of_environment, first_line
from integration.train.launch.world import World

_ANSWER_SECONDS = 3.0


class LostRanksError(RuntimeError):
    """Other ranks are lost; the message names them and their hosts."""


@dataclass(frozen=True)
class RankAddress:
    """The host of a rank, and the address of its listening socket."""

    rank: int
    machine: str
    address: str
    port: int

    @property
    def host(self) -> str:
        """Description of the host."""
        return f"{self.address} ({self.machine})"


class LivenessCheck:
    """Checks which ranks are alive; all ranks construct it together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._listener = socket.create_server(("", 0), backlog=max(world.size, 128))
        address = address_towards(endpoint_of_environment()) or "127.0.0.1"
        port = self._listener.getsockname()[1]
        self._addresses: list[RankAddress] = [RankAddress(0, "", "", 0)] * world.size
        own = RankAddress(world.rank, socket.gethostname(), address, port)
        dist.all_gather_object(self._addresses, own)

    def explain(self, error: BaseException) -> LostRanksError | None:
        """Returns the lost ranks, if ``error`` is of a collective and ranks are lost."""
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            return None
        missing = self._missing()
        if not missing:
            return None
        return LostRanksError(
            f"rank {self._world.rank} of {self._world.size} stopped: {'; '.join(missing)}"
            f" ({first_line(error)}); restart all ranks, which resume from the newest checkpoint"
        )

    def _missing(self) -> list[str]:
        hosts: dict[str, list[RankAddress]] = {}
        for address in self._addresses:
            if address.rank != self._world.rank:
                hosts.setdefault(address.host, []).append(address)
        with ThreadPoolExecutor(min(len(hosts), 64)) as pool:
            sentences = pool.map(_lost_ranks, hosts.values())
        return [sentence for sentence in sentences if sentence is not None]


def _lost_ranks(addresses: Sequence[RankAddress]) -> str | None:
    """Returns a clause on the lost ranks of one host, if any."""
    ended = []
    for each in addresses:
        try:
            socket.create_connection((each.address, each.port), timeout=_ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            ended.append(each.rank)
        except OSError:
            lost = _ranks(one.rank for one in addresses)
            return f"the host of {lost}, {each.host}, does not answer"
    return f"{_ranks(ended)} on {addresses[0].host} ended" if ended else None


def _ranks(numbers: Iterable[int]) -> str:
    """Returns ``rank 3`` or ``ranks 1, 3``."""
    listed = sorted(numbers)
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"
