"""Runs tests: ``python -m tools.run_tests [--slow] [PROJECT ...] [PYTEST'S ARGUMENTS]``.

Of one project, as many files at a time as there are cores, and one more, as some tests wait. Of
several, or of all, as many projects at a time: each imports torch and starts ranks once, and no
core waits for a project's last file. A project's output is printed when it ends; its JUnit file is
``.nox/test-results/PROJECT.xml``. With ``--slow`` the tests marked slow run instead of the others,
and the file is ``slow-PROJECT.xml``.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from tools.workspace import ROOT

RESULTS = ROOT / ".nox" / "test-results"
MOST_AT_A_TIME = 4  # of more nobody knows whether memory suffices
# The folder of each project, those first whose tests take longest.
PROJECTS = {
    "integration": Path("integration"),
    "fsdp": Path("packages/fsdp"),
    "plan-api": Path("packages/plan-api"),
    "dtensor-rules": Path("packages/dtensor-rules"),
    "dist-rng": Path("packages/dist-rng"),
    "ragged-shard": Path("packages/ragged-shard"),
    "tools": Path("tools"),
    "fused-comm": Path("packages/fused-comm"),
    "testkit": Path("testkit"),
    "dbuffer": Path("packages/dbuffer"),
}

_NO_TESTS = 5  # pytest's exit status


@dataclass(frozen=True)
class Run:
    """One project's tests, which have ended.

    Attributes:
        status: pytest's exit status.
        output: what it printed; empty where it was shown as it came.
        seconds: of wall time.
    """

    project: str
    status: int
    output: str
    seconds: float


def run(project: str, arguments: Sequence[str], *, slow: bool, captured: bool) -> Run:
    """Runs the tests of one project, or those of them that are marked slow."""
    report = RESULTS / f"{'slow-' if slow else ''}{project}.xml"
    report.unlink(missing_ok=True)
    # As a script, not `python -m pytest`: that would put the root on sys.path, where the folders
    # testkit/ and integration/ could replace packages that failed to install.
    pytest = Path(sys.executable).with_name("pytest")
    folder = PROJECTS[project] / "tests"
    tier = ["-m", "slow"] if slow else []
    command = [str(pytest), f"--junit-xml={report}", *tier, str(folder), *arguments]
    # As ranks do: idle threads of a process wait busily for its next loop, on others' cores.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    start = time.monotonic()
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE if captured else None,
        stderr=subprocess.STDOUT if captured else None,
        text=True,
    )
    output = f"$ {shlex.join(command)}\n{ended.stdout}" if captured else ""
    none_is_slow = slow and ended.returncode == _NO_TESTS
    return Run(project, 0 if none_is_slow else ended.returncode, output, time.monotonic() - start)


def main(words: Sequence[str], *, slow: bool = False) -> int:
    """Runs what the command line asks for; the exit status.

    Args:
        words: projects, and behind them pytest's arguments.
        slow: whether to run the tests marked slow, instead of the others.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    arguments = words[len(names) :]
    if unknown := [name for name in names if name not in PROJECTS]:
        print(f"run_tests: expected projects of {[*PROJECTS]}, got {unknown}", file=sys.stderr)
        return 2
    at_a_time = min(len(os.sched_getaffinity(0)) + 1, MOST_AT_A_TIME)
    if len(names) == 1:
        files = ("-n", str(at_a_time), "--dist=loadfile")
        return run(names[0], [*files, *arguments], slow=slow, captured=False).status
    chosen = [name for name in PROJECTS if not names or name in names]
    failed = []
    with ThreadPoolExecutor(at_a_time) as pool:
        one = partial(run, arguments=arguments, slow=slow, captured=True)
        running = [pool.submit(one, name) for name in chosen]
        for future in as_completed(running):
            ended = future.result()
            print(f"{ended.output}{ended.project}: took {ended.seconds:.0f} s\n", flush=True)
            if ended.status:
                failed.append(ended.project)
    print(f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(chosen)}")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow", action="store_true")
    options, others = parser.parse_known_args()
    sys.exit(main(others, slow=options.slow))
