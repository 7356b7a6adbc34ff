"""``python -m integration.soak``: injects faults into a run and compares its losses."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from integration.errors import EXIT_USAGE, UsageError
from integration.report.command_output import ProgressBar, print_result
from integration.soak.fault_schedule import Fault
from integration.soak.options import (
    DISTURBED,
    UNDISTURBED,
    SoakOptions,
    parse_options,
    prepare,
)  # fmt: skip
from integration.soak.report import LossComparison, compare, describe, soak_of, write_soak
from integration.soak.supervisor import FaultError, Incident, disturb
from integration.soak.torchrun import Torchrun
from integration.train.folders import make_folder
from integration.train.metrics import read_metrics

Note = Callable[[Incident], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if losses differ, 2 if the options are invalid."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = parse_options(arguments)
        fault_schedule = prepare(options)
        make_folder(options.out)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    incidents: list[Incident] = []

    def note(incident: Incident) -> None:
        incidents.append(incident)
        print(describe(incident), file=sys.stderr if options.json else sys.stdout, flush=True)

    outcome: LossComparison | str
    try:
        outcome = _run_both(options, fault_schedule, note)
    except FaultError as error:
        outcome = str(error)
    soak = soak_of(arguments, len(fault_schedule), incidents, outcome)
    path = write_soak(soak, options.out)
    sentence = f"{soak.failure or soak.comparison}; the log is {path}"
    print_result(sentence, soak.as_json() | {"log": path}, as_json=options.json)
    return 0 if soak.passed else 1


def _run_both(options: SoakOptions, fault_schedule: Sequence[Fault], note: Note) -> LossComparison:
    with ProgressBar() as bar:
        for name, schedule in ((UNDISTURBED, ()), (DISTURBED, fault_schedule)):
            show = partial(bar.show, name, total=options.steps)
            with Torchrun(options, name, restarts=len(schedule)) as run:
                disturb(run, schedule, timeout=options.timeout, say=note, progress=show)
    undisturbed, disturbed = (read_metrics(options.out / run) for run in (UNDISTURBED, DISTURBED))
    return compare(undisturbed, disturbed, options.steps)


if __name__ == "__main__":
    sys.exit(main())
