"""Runs a function on several gloo ranks, in processes that are kept for the next call.

`run` is the caller's side, `pool` has the processes, `forkserver` starts them, `worker` is what
each of them does, `messages` are what the two exchange. `network_hosts` is separate: hosts for
tests of links that are cut or slow.
"""

from testkit.ranks.run import RankError, RankReport, preload, run_ranks

__all__ = ["RankError", "RankReport", "preload", "run_ranks"]
