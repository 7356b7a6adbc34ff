"""Runs a function on several gloo ranks, in processes that are kept for the next call.

`run` is the caller's side, `pool` has the processes, `forkserver` starts them, `worker` is what
each of them does, `messages` are what the two exchange. `python_command` has other processes of the
fork server: commands that begin with torch imported. `network_hosts` is separate: hosts for tests
of links that are cut or slow; `ports` are for ranks that are started otherwise.
"""

from testkit.ranks.forkserver import preload
from testkit.ranks.ports import free_port
from testkit.ranks.python_command import PythonProcess, run_python, start_python
from testkit.ranks.run import RankError, RankReport, run_ranks

__all__ = [
    "PythonProcess",
    "RankError",
    "RankReport",
    "free_port",
    "preload",
    "run_python",
    "run_ranks",
    "start_python",
]
