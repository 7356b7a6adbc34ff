"""Runs a function on several ranks, each with a simulated device, and checks it for races."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from testkit import sim
from testkit.ranks.run import run_in_pool_of
from testkit.sim import build
from testkit.sim.races import RaceChecker

T = TypeVar("T")


def run_sim_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    races: bool = True,
    timeout: float = 60.0,
    **kwargs: Any,
) -> list[T]:
    """Runs `fn` as `testkit.run_ranks` does, on ranks whose current device is a simulated one.

    The default group has gloo for the host and the device's backend. The first call compiles the
    extension (`testkit.sim.build`), outside of `timeout`.

    Args:
        fn: as for `run_ranks`.
        world_size: as for `run_ranks`.
        *args: sent to every rank.
        races: whether accesses that race fail the call (`RaceChecker`); False for a function that
            has a checker of its own.
        timeout: as for `run_ranks`.
        **kwargs: sent to every rank.

    Returns:
        the results of `fn` by rank.

    Raises:
        RankError: as for `run_ranks`; of a `RaceError` if a rank's accesses raced.
    """
    build.compile_extension()
    call = (fn, races, *args)
    return run_in_pool_of(
        sim.NAME, _checked, world_size, call, kwargs, timeout, start_device=sim.start_device
    )


def _checked(fn: Callable[..., T], races: bool, *args: Any, **kwargs: Any) -> T:
    with RaceChecker() if races else nullcontext():
        return fn(*args, **kwargs)
