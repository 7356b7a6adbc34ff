"""``python -m integration.train.agent``: torchrun's agent of one host, for ``launch/torchrun.sh``.

torchrun by itself publishes the host name, and decides by it which host has the store. This agent
derives both from the route to the rendezvous. It also reports wrong options and missing hosts in a
sentence, where torchrun shows a traceback.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from integration.errors import EXIT_USAGE, UsageError
from integration.train.addresses import Endpoint, address_towards, is_local_address
from integration.train.store_client import StoreUnreachableError, connect, first_line


def resolve_rendezvous(rendezvous: str, timeout: float) -> tuple[str, bool]:
    """Returns this host's address on the route to the rendezvous, and whether it is this host.

    Args:
        rendezvous: ``NAME:PORT``.
        timeout: seconds to wait for the agent of another host.

    Raises:
        UsageError: the text has another form, or there is no agent.
    """
    endpoint = Endpoint.parse(rendezvous)
    here = is_local_address(endpoint.name)
    if not here:
        try:
            connect(endpoint, timeout)
        except StoreUnreachableError as why:
            raise UsageError(
                f"expected an agent at {endpoint} within {timeout:g} s, got none ({why}); start the"
                " host of that address, or correct RENDEZVOUS, on all hosts"
            ) from None
    address = address_towards(endpoint)
    assert address is not None, f"{endpoint} has answered"
    return address, here


def launch(options: argparse.Namespace) -> int:
    """Joins the other hosts and runs this host's ranks.

    Args:
        options: the options of `main`.

    Returns:
        0, the exit code of the first rank that failed, or 128 plus the signal that ended this host.

    Raises:
        UsageError: the rendezvous is unreachable, or not all hosts joined in time.
    """
    seconds, address, here = options.join_timeout, "127.0.0.1", True
    if options.hosts > 1:
        address, here = resolve_rendezvous(options.rendezvous, seconds)
    times = f"join_timeout={seconds},read_timeout={seconds}"
    words = [
        *("--nnodes", str(options.hosts), "--nproc-per-node", str(options.ranks)),
        *("--max-restarts", str(options.restarts), "--local-addr", address),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", options.rendezvous),
        *("--rdzv-id", options.job, "--rdzv-conf", f"is_host={int(here)},{times}"),
        *("--module", "integration.train", *options.options),
    ]
    try:
        run.main(words)
    except RendezvousTimeoutError:
        raise UsageError(
            f"expected {options.hosts} hosts to join {options.rendezvous} within {seconds} s, got"
            " fewer; start the same command on each of them, or correct HOSTS"
        ) from None
    except RendezvousConnectionError as error:
        raise UsageError(
            f"expected a rendezvous at {options.rendezvous}, got"
            f" {first_line(error.__cause__ or error)}; correct RENDEZVOUS, or give another port, on"
            " all hosts"
        ) from None
    except SignalException as error:
        # torchrun has signalled its ranks and waited for them.
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode != EXIT_USAGE:
            print(error, file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code, which is 2 for a usage error."""
    parser = _AgentParser(prog="integration.train.agent", description=__doc__)
    parser.add_argument("--hosts", type=_positive, default=1, metavar="HOSTS")
    parser.add_argument("--ranks", type=_positive, default=1, metavar="RANKS", help="of this host")
    parser.add_argument("--rendezvous", default="localhost:0", metavar="NAME:PORT")
    parser.add_argument("--join-timeout", type=_positive, default=300, metavar="SECONDS")
    parser.add_argument("--restarts", type=_count, default=0, metavar="TIMES")
    parser.add_argument("--job", default="spmd", metavar="NAME")
    parser.add_argument(
        "options", nargs="*", help="after --: options of python -m integration.train"
    )
    try:
        return launch(parser.parse_args(arguments))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


class _AgentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> int:
    if _count(text) < 1:
        raise argparse.ArgumentTypeError("expected at least 1, got 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
