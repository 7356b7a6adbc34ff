"""``python -m integration.compare``: runs experiments, compares the curves, writes the report."""

import sys
from collections.abc import Sequence

from rich.console import Console

from integration.compare import results_folder
from integration.compare.display import JobsDisplay
from integration.compare.options import parse_options
from integration.compare.report import RESULTS_FILE, ExperimentResults, find, make_report
from integration.compare.result import compare_runs
from integration.compare.runner import run_jobs
from integration.compare.setup import Comparison, prepare
from integration.errors import EXIT_USAGE, UsageError
from integration.report.command_output import to_json
from integration.report.terminal import print_report
from integration.report.write import write_report
from integration.train.stop import EXIT_TERMINATED, StopRequest

EXIT_NOT_PASSED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if a comparison fails, 2 for a usage error, 143 on SIGTERM."""
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        comparison = prepare(parse_options(arguments))
        results_folder.replace(comparison.options.out)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    out = comparison.options.out
    results = _run(comparison)
    if results is None:
        runs = out / results_folder.RUNS
        print(f"stopped on request: no report; what the runs wrote is in {runs}", file=sys.stderr)
        return EXIT_TERMINATED
    report = make_report(comparison, results, arguments)
    as_json = comparison.options.json
    document = to_json(report.document)
    (out / RESULTS_FILE).write_text(document + "\n")
    if as_json:
        print(document)
    console = Console(stderr=as_json, highlight=False)
    print_report(report.page, write_report(report.page, out), console)
    return 0 if all(each.passes for each in results) else EXIT_NOT_PASSED


def _run(comparison: Comparison) -> list[ExperimentResults] | None:
    """Runs every job; returns None if SIGTERM or Ctrl-C requested a stop."""
    stop = StopRequest()
    jobs = comparison.jobs
    display = JobsDisplay(jobs, Console(stderr=True, highlight=False, soft_wrap=True))
    with display:
        outcomes = run_jobs(jobs, display, stop)
    if len(outcomes) < len(jobs):
        return None
    remaining = iter(outcomes)
    results = [
        find(each, compare_runs(each.runs, [next(remaining) for _ in each.runs]))
        for each in comparison.experiments
    ]
    for failure in (failure for each in results for failure in each.failures):
        display.failed(failure)
    return results


if __name__ == "__main__":
    sys.exit(main())
