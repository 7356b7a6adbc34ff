"""``python -m integration.train.agent NAME:PORT SECONDS``: what torchrun's agent is to be told.

By itself torchrun hands out this machine's name, and decides by it who holds the store. Printed are
the address by which other hosts reach this one, and 1 where the rendezvous is here, else 0. One on
another host is waited for, since of a wrong address torchrun only has a traceback.
"""

import sys
from collections.abc import Sequence

from integration.errors import EXIT_USAGE, UsageError
from integration.train.addresses import Endpoint, address_towards, is_ours, wait_for_listener


def place(rendezvous: str, timeout: float) -> tuple[str, bool]:
    """Return this host's address towards the rendezvous, and whether that is here.

    Args:
        rendezvous: ``NAME:PORT``.
        timeout: seconds to wait for someone who listens there, where it is on another host.

    Raises:
        UsageError: another form, or nobody there.
    """
    endpoint = Endpoint.parse(rendezvous)
    here = is_ours(endpoint.name)
    if not here and (why := wait_for_listener(endpoint, timeout)) is not None:
        raise UsageError(
            f"nobody listens at {endpoint} within {timeout:g} s ({why}); start the host of that"
            " address, or correct RENDEZVOUS, on all hosts"
        )
    address = address_towards(endpoint)
    assert address is not None, f"{endpoint} has answered"
    return address, here


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    rendezvous, seconds = arguments
    try:
        address, here = place(rendezvous, float(seconds))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(address, int(here))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
