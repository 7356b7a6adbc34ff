"""``python -m integration.recommend``: recommends how to train a model on a number of ranks."""

import sys
import warnings
from collections.abc import Sequence

from rich.console import Console

from integration.errors import EXIT_USAGE, UsageError
from integration.recommend.options import RecommendSetup, parse_options, prepare

_NOTHING_FITS = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 if nothing fits, or 2 for wrong options."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        setup = prepare(parse_options(arguments))
        return _run(setup)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _run(setup: RecommendSetup) -> int:
    # Imported after validation, as they take seconds.
    from integration.recommend.output import as_json, recommendation_table, sentences, write
    from integration.recommend.search import recommend
    from integration.report.command_output import ProgressBar, to_json
    from integration.report.terminal import print_table

    warnings.simplefilter("ignore")  # of torch's, about fake process groups
    with ProgressBar() as bar:
        found = recommend(setup, lambda what, number, total: bar.show(what, number - 1, total))
    console = Console(stderr=setup.options.json)
    if setup.options.json:
        print(to_json(as_json(setup, found)))
    elif found.ranked:
        print_table(recommendation_table(found), console)
    for sentence in sentences(setup, found):
        console.print(sentence, soft_wrap=True, markup=False, highlight=False)
    if found.ranked and setup.options.out is not None:
        for path in write(setup, found.ranked[0], setup.options.out):
            print(f"written: {path}", file=sys.stderr)
    return 0 if found.ranked else _NOTHING_FITS


if __name__ == "__main__":
    sys.exit(main())
