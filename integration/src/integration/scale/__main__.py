"""``python -m integration.scale``: simulates training on up to 16,384 ranks."""

import sys
from collections.abc import Sequence

from integration.errors import EXIT_USAGE, UsageError
from integration.scale.options import parse_options, prepare
from integration.train.folders import make_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 when the options are wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        setup = prepare(parse_options(arguments))
        make_folder(setup.options.out)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    from integration.report.command_output import ProgressBar, print_result
    from integration.scale.report import as_json, write_scale
    from integration.scale.simulation import simulate

    with ProgressBar() as bar:
        scale = simulate(setup, bar.begin)
    report = write_scale(setup, scale)
    models, most = len(setup.shapes), max(setup.worlds)
    print_result(
        f"simulated {len(scale.counts)} steps of {models} models on up to {most:,} ranks: {report}",
        as_json(setup, scale) | {"report": report},
        as_json=setup.options.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
