"""``python -m integration.train.launch.agent``: torchrun's agent of one of several hosts.

torchrun by itself publishes the host name, and decides by it which host has the store. This agent
derives both from the route to the rendezvous. It reports wrong options and missing hosts in a
sentence, where torchrun shows a traceback, and ends where torchrun waits for minutes for the store
of a host that is gone. ``integration/launch/torchrun.sh`` starts it.
"""

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import psutil  # type: ignore[import-untyped]
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from integration.errors import EXIT_LOST, EXIT_USAGE, UsageError
from integration.train.launch.endpoint import (
    Endpoint,
    StoreUnreachableError,
    address_towards,
    answers,
    connect,
    first_line,
    is_local_address,
)

# Time between the end of a host's ranks and the end of its agent, which asks the store meanwhile.
_AGENT_SECONDS = 10.0
_ANSWER_SECONDS = 3.0
_POLL_SECONDS = 1.0


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
    if not here:
        threading.Thread(
            target=_end_without_store, args=(Endpoint.parse(options.rendezvous),), daemon=True
        ).start()
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
        if failure.exitcode not in (EXIT_USAGE, EXIT_LOST):  # those have said why
            print(error, file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code, which is 2 for a usage error."""
    parser = _AgentParser(prog="integration.train.launch.agent", description=__doc__)
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


def _end_without_store(endpoint: Endpoint) -> None:
    """Ends this process when its ranks have ended and the store's host does not answer.

    torchrun reports the end of ranks to the store, which it waits for (torch 2.11 to 2.15).
    """
    started, ended_at = False, None
    while True:
        time.sleep(_POLL_SECONDS)
        if _has_ranks():
            started, ended_at = True, None
        elif started and ended_at is None:
            ended_at = time.monotonic()
        if ended_at is None or time.monotonic() - ended_at < _AGENT_SECONDS:
            continue
        if not answers(endpoint, _ANSWER_SECONDS):
            print(
                f"error: the ranks of this host have ended, and the host of the rendezvous,"
                f" {endpoint}, does not answer; start all hosts again, which resume from the newest"
                " checkpoint",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_LOST)


def _has_ranks() -> bool:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.status() != psutil.STATUS_ZOMBIE and "RANK" in child.environ():
                return True
    return False


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
