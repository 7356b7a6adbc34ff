"""Runs on several hosts without torchrun: the same command on each, with ``--hosts``.

Each host's launcher manages its own ranks only. All ranks join at the address of host 0
(rendezvous.py). torchrun's agents communicate with each other instead, and report a missing host by
a traceback that does not name it.
"""

import os
from dataclasses import dataclass

from integration.errors import UsageError
from integration.train.addresses import Endpoint
from integration.train.config import TrainConfig
from integration.train.launch import started_by_launcher
from integration.train.world import World


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        number: number of hosts.
        rank: index of this host.
        rendezvous: endpoint on host 0 where all ranks join.
    """

    number: int
    rank: int
    rendezvous: Endpoint

    @classmethod
    def of(cls, config: TrainConfig) -> "Hosts | None":
        """Returns the hosts of a validated ``config``; None if it names no rendezvous.

        Raises:
            UsageError: the rendezvous is invalid, or another launcher has started the ranks.
        """
        if config.rendezvous is None:
            return None
        if "RANK" in os.environ and not started_by_launcher():
            raise UsageError(
                "--rendezvous: expected none under torchrun or another launcher that sets RANK, got"
                f" {config.rendezvous}; leave --rendezvous and --hosts out"
            )
        if config.hosts > 1 and config.ranks is None and not started_by_launcher():
            raise UsageError(
                f"--hosts {config.hosts}: expected --ranks, the number of ranks of each host, got"
                " none; give --ranks"
            )
        return cls(config.hosts, config.host_rank, Endpoint.parse(config.rendezvous))

    def declare(self, local: World) -> None:
        """Sets the environment of a rank among the ranks of all hosts.

        Args:
            local: the rank and number of ranks on this host; every host has the same number.
        """
        os.environ.update(
            RANK=str(self.rank * local.size + local.rank),
            WORLD_SIZE=str(self.number * local.size),
            MASTER_ADDR=self.rendezvous.name,
            MASTER_PORT=str(self.rendezvous.port),
            TORCHELASTIC_USE_AGENT_STORE="False",  # the agent's store is local to this host
        )
