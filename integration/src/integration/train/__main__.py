"""``python -m integration.train``: trains on one rank, on ``--ranks N``, or under torchrun."""

import errno
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch.distributed.checkpoint.api import CheckpointException

from integration.device import Device
from integration.errors import EXIT_LOST, EXIT_USAGE, UsageError
from integration.report.command_output import print_result
from integration.train.config import TrainConfig, parse_config
from integration.train.launch.liveness_check import LivenessCheck
from integration.train.launch.local import launch, report_status
from integration.train.launch.watchdog import record_collectives
from integration.train.launch.world import declared_world, exit_process, has_agent, process_group
from integration.train.metrics import read_result
from integration.train.setup import locked_setup, prepare
from integration.train.stop import EXIT_TERMINATED, StopRequest
from integration.train.validation import validate


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    The code is 0, 2 for a usage error, 143 after SIGTERM, or 1 if other ranks are lost.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        config = parse_config(arguments)
        device = validate(config).system.device
        if config.ranks is not None and "RANK" in os.environ:
            raise UsageError(
                "--ranks: expected none under torchrun, which starts the ranks, got"
                f" {config.ranks}; leave it out"
            )
        if config.ranks is None or config.ranks == 1:
            return _run_rank(config, device)
        prepare(config, config.ranks)
        inner = [*arguments, "--ranks", "None"]
        return launch(inner, config.ranks, log_folder=config.out / "logs")
    except UsageError as error:
        _report_error(str(error))
        return EXIT_USAGE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _report_error(
            f"{config.out} cannot be written ({error.strerror}); free space there and run the same"
            " command again to resume from the newest complete checkpoint"
        )
        return EXIT_USAGE


def _run_rank(config: TrainConfig, device: Device) -> int:
    torch.set_num_threads(config.threads)
    stop = StopRequest()
    record_collectives(config.out)
    joining = process_group(config.timeout, join_seconds=config.join_timeout, device=device)
    with joining as world:
        report_status("started")
        liveness = LivenessCheck(world) if world.size > 1 else None
        # Imported after validation, as it takes a second.
        from integration.train.loop import Trainer

        with locked_setup(config, world) as setup:
            cores = os.cpu_count() or 1
            if world.is_main and world.size * config.threads > cores:
                warnings.warn(
                    f"{world.size} ranks x {config.threads} threads share {cores} cores:"
                    " step times are not meaningful",
                    stacklevel=1,
                )
            try:
                finished = Trainer(setup, world).run(stop)
            except (RuntimeError, CheckpointException) as error:
                lost = liveness.explain(error) if liveness else None
                if lost is None:
                    raise
                print(f"error: {lost}", file=sys.stderr)
                return EXIT_LOST
        if world.is_main:
            result = read_result(config.out, finished=finished)
            print_result(str(result), asdict(result), as_json=config.json)
    return 0 if finished else EXIT_TERMINATED


def _report_error(sentence: str) -> None:
    """Reports an error once: to the launcher if there is one, otherwise from the first rank."""
    world = declared_world()
    if report_status("refused", sentence):
        return
    if not world.is_main and has_agent():
        # torchrun ends the other ranks by SIGTERM when the first has exited. Only a rank that is
        # not ended prints the error.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)  # torchrun may be slow on a loaded machine
    print(f"error: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    exit_process(main())
