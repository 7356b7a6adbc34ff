"""Several hosts without torchrun: the same command on each, told how many there are.

Each host's launcher looks after its own ranks and knows nothing of other hosts. The ranks of all
meet at the first one's address (meeting.py). torchrun's agents talk to each other instead, and what
they say of a host that has not come is a traceback that does not name it.
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
    """The hosts of a run, and which this is.

    Attributes:
        number: of hosts.
        rank: of this host.
        rendezvous: where all ranks meet, on host 0.
    """

    number: int
    rank: int
    rendezvous: Endpoint

    @classmethod
    def of(cls, config: TrainConfig) -> "Hosts | None":
        """Returns the hosts of a validated ``config``; None where it names no rendezvous.

        Raises:
            UsageError: the rendezvous has another form, or someone else has started the ranks.
        """
        if config.rendezvous is None:
            return None
        if "RANK" in os.environ and not started_by_launcher():
            raise UsageError(
                f"--rendezvous {config.rendezvous} was given and RANK is set by what started this"
                " process, torchrun or another, which also knows the hosts; leave --rendezvous and"
                " --hosts out"
            )
        if config.hosts > 1 and config.ranks is None and not started_by_launcher():
            raise UsageError(
                f"--hosts {config.hosts} needs the number of ranks of each host; give --ranks"
            )
        return cls(config.hosts, config.host_rank, Endpoint.parse(config.rendezvous))

    def declare(self, local: World) -> None:
        """Sets the environment of a rank among all hosts.

        Args:
            local: its place among the ranks of this host; every host has as many.
        """
        os.environ.update(
            RANK=str(self.rank * local.size + local.rank),
            WORLD_SIZE=str(self.number * local.size),
            MASTER_ADDR=self.rendezvous.name,
            MASTER_PORT=str(self.rendezvous.port),
            TORCHELASTIC_USE_AGENT_STORE="False",  # which is this host's alone
        )
