"""``python -m integration.compare``: runs every job, compares the curves, writes the report."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from integration.compare import results_folder
from integration.compare.diffusion import collect_diffusion
from integration.compare.display import JobsDisplay
from integration.compare.options import parse_options
from integration.compare.parallelism import collect as collect_parallelism
from integration.compare.random_numbers import collect as collect_random_numbers
from integration.compare.results import Results, collect, collect_optimizers
from integration.compare.runner import run_jobs
from integration.compare.setup import Comparison, prepare
from integration.errors import EXIT_USAGE, UsageError
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
    results = _run(comparison)
    if results is None:
        runs = comparison.options.out / results_folder.RUNS
        print(f"stopped on request: no report; what the runs wrote is in {runs}", file=sys.stderr)
        return EXIT_TERMINATED
    _report(comparison, results, arguments)
    return 0 if results.passes else EXIT_NOT_PASSED


def _run(comparison: Comparison) -> Results | None:
    """Runs every job; returns None if SIGTERM or Ctrl-C requested a stop."""
    stop = StopRequest()
    jobs = comparison.all_jobs
    display = JobsDisplay(jobs, Console(stderr=True, highlight=False, soft_wrap=True))
    with display:
        outcomes = run_jobs(jobs, display, stop)
    if len(outcomes) < len(jobs):
        return None
    remaining = iter(outcomes)
    systems = [next(remaining) for _ in comparison.jobs]
    random = [next(remaining) for _ in comparison.random_jobs]
    optimizers = [next(remaining) for each in comparison.optimizer_jobs for _ in each.jobs]
    parallel = [next(remaining) for _ in comparison.parallel_jobs]
    diffusion = list(remaining)
    results = Results(
        collect(systems),
        collect_random_numbers(comparison.random_jobs, random),
        collect_optimizers(comparison.optimizer_jobs, optimizers),
        collect_parallelism(comparison.parallel_jobs, parallel),
        collect_diffusion(comparison.options.diffusion_model, comparison.diffusion_jobs, diffusion),
    )
    for failure in results.failures:
        display.failed(failure)
    return results


def _report(comparison: Comparison, results: Results, arguments: Sequence[str]) -> Path:
    # Imported after the runs, which do not need matplotlib's memory.
    from integration.report.comparison import write_report
    from integration.report.comparison_terminal import print_results

    report = write_report(comparison, results, arguments)
    print_results(results, report, Console(highlight=False))
    return report


if __name__ == "__main__":
    sys.exit(main())
