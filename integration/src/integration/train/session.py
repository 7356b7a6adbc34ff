"""``python -m integration.train.session``: several runs, one after another, in the same processes.

Importing torch and transformers takes longer than a short run of a small model, so that comparisons
of many small runs share processes. Step times of first steps are not meaningful, as earlier runs
have filled caches. Peak memory is reset for each run, but includes process groups and caches of
earlier runs. Changes to torch, such as dist-rng's, are undone.
"""

import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from integration.device import local_ranks, select_device
from integration.errors import EXIT_USAGE, UsageError
from integration.train.config import TrainConfig, parse_config
from integration.train.launch.local import launch, report_status
from integration.train.launch.world import World, exit_process, process_group
from integration.train.measurement.memory import reset_peak_rss
from integration.train.setup import locked_setup
from integration.train.stop import EXIT_TERMINATED, StopRequest

MODULE = "integration.train.session"
# By package, the function that undoes the changes that a run made.
_UNDO = {
    "plan_api": "uninstall",  # first: it replaces functions that dist_rng has replaced
    "dist_rng": "uninstall",
    "dtensor_rules": "disable",
    "fsdp": "uninstall",
    "ragged_shard": "uninstall",
}


def write_session(path: Path, runs: Sequence[Sequence[str]]) -> None:
    """Writes the command lines of ``runs``, each as ``python -m integration.train`` takes them."""
    path.write_text(json.dumps([list(arguments) for arguments in runs], indent=1))


def read_session(path: Path) -> list[TrainConfig]:
    """Returns the configurations of a session, all for one number of ranks.

    Raises:
        UsageError: the file cannot be read, holds no runs, or runs that cannot share processes.
    """
    try:
        runs = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the session {path}: {error}; write it again") from error
    configs = [parse_config(arguments) for arguments in runs]
    ranks = sorted({config.ranks or 1 for config in configs})
    if len(ranks) != 1:
        raise UsageError(
            f"session {path}: expected one number of ranks for all runs, got {ranks}; give one"
        )
    for option in ("timeout", "device"):
        given = sorted({str(getattr(config, option)) for config in configs})
        if len(given) != 1:
            raise UsageError(
                f"session {path}: expected one --{option} for all runs, which share a process"
                f" group, got {' and '.join(given)}; give one"
            )
    return configs


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the session in the file that ``arguments`` names; returns a run's exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        (path,) = arguments
        configs = read_session(Path(path))
        ranks = configs[0].ranks or 1
        if ranks > 1 and "RANK" not in os.environ:
            return launch([path], ranks, log_folder=Path(path).with_suffix(".logs"), module=MODULE)
        return _run_rank(configs)
    except UsageError as error:
        if not report_status("refused", str(error)):
            print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _run_rank(configs: Sequence[TrainConfig]) -> int:
    stop = StopRequest()
    first = configs[0]
    device = select_device(first.device, local_ranks(first.ranks))
    joining = process_group(first.timeout, join_seconds=first.join_timeout, device=device)
    with joining as world:
        report_status("started")
        gc.freeze()  # collections between runs skip imported objects
        for config in configs:
            restore_torch()
            if not _run_one(config, world, stop):
                return EXIT_TERMINATED
    return 0


def _run_one(config: TrainConfig, world: World, stop: StopRequest) -> bool:
    """Runs one configuration and returns whether it finished; frees its memory on return."""
    from integration.train.loop import Trainer

    reset_peak_rss()
    torch.set_num_threads(config.threads)
    with locked_setup(config, world) as setup:
        setup.system.device.reset_peak()
        return Trainer(setup, world).run(stop)


def restore_torch() -> None:
    """Undoes the changes to torch that an earlier run made for the whole process."""
    gc.collect()  # placements that a model still uses could not be unregistered
    for package, undo in _UNDO.items():
        if module := sys.modules.get(package):
            getattr(module, undo)()


if __name__ == "__main__":
    exit_process(main())
