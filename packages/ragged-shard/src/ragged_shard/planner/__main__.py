"""The planner's command line: ``python -m ragged_shard.planner --preset deepseek-v3``.

It needs the standard library alone; tables are better with rich, pictures need matplotlib, and
``pip install ragged-shard[plot]`` brings both. Exit status: 0, or 2 after one sentence on stderr
that says what is wrong.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ragged_shard.planner.architectures import build_model
from ragged_shard.planner.arguments import Options, fail, parse
from ragged_shard.planner.blocks import resolve_target
from ragged_shard.planner.hf_config import load_config
from ragged_shard.planner.model import Model
from ragged_shard.planner.presets import preset_model
from ragged_shard.planner.recommend import recommend
from ragged_shard.planner.report import to_json
from ragged_shard.planner.sweep import Point, Settings, plan_group, sweep
from ragged_shard.planner.table import plain_table, print_table
from ragged_shard.planner.wording import rows

#: Larger layouts have too many ranks to be read in a picture.
READABLE = 32
EXTRA = "pip install ragged-shard[plot]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line with ``arguments``, by default the process's; the exit status.

    Raises:
        SystemExit: With status 2, after one sentence on stderr, on bad input and where a file
            cannot be read or written; with 0 after ``--help``.
    """
    options = parse(arguments)
    try:
        run(options)
    except BrokenPipeError:
        # The reader has seen enough, as `| head` has; nothing is left to say, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        fail(error)
    return 0


def run(options: Options) -> None:
    """Plans, and prints and writes what was asked for.

    Raises:
        ValueError: The model or the numbers make no sense, or matplotlib is missing for a picture.
        OSError: A file cannot be written.
    """
    if options.plot is not None:
        _check_matplotlib()  # before the table, not after it
    model = _model(options)
    # Before a group is picked: in one without experts, "experts" applies to nothing.
    settings = Settings(resolve_target(model, options.target), options.order, options.alignment)
    if options.group is not None:
        model = model.only(options.group)
    points = sweep(model, options.world_sizes, options.rows, settings)
    _print_header(model, settings)
    _print_table(points)
    found = recommend(points, tolerance=options.tolerance) if options.recommend else ()
    for item in found:
        print(item.sentence())
    if options.explain:
        worst = max(points, key=lambda point: point.worst.padding_ratio)
        layout = plan_group(model, worst.worst.name, worst, settings)
        print(f"{worst.worst.name}, {worst.world_size:,} ranks, {rows(worst.rows)}:")
        print(layout.explain())
    if options.json is not None:
        options.json.write_text(to_json(model, settings, points, found) + "\n")
        print(f"wrote {options.json}")
    if options.plot is not None:
        for path in _plot(options.plot, model, points, settings):
            print(f"wrote {path}")
    sys.stdout.flush()


def _model(options: Options) -> Model:
    if options.preset is not None:
        return preset_model(options.preset, experts=options.experts, with_mtp=options.mtp)
    config = load_config(str(options.from_model))
    return build_model(config, experts=options.experts, with_mtp=options.mtp)


def _print_header(model: Model, settings: Settings) -> None:
    first, last = model.groups[0].name, model.groups[-1].name
    groups = f"group {first}" if first == last else f"{len(model.groups)} groups"
    blocked = {"experts": "expert matrices", "all": "all matrices"}.get(
        settings.target, f"matrices matching {settings.target!r}"
    )
    multiple = f"; shards of a multiple of {settings.alignment:,}" if settings.alignment > 1 else ""
    print(f"{model.name}: {model.numel:,} parameters in {groups}; sizes in elements")
    print(f"blocks of rows in {blocked}; tensors in the order {settings.order!r}{multiple}")


def _print_table(points: Sequence[Point]) -> None:
    try:
        print_table(points, sys.stdout)
    except ImportError:
        print(plain_table(points))
        print(f"a table with colours needs rich: {EXTRA}", file=sys.stderr)


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib: {EXTRA}") from error


def _plot(
    folder: Path, model: Model, points: Sequence[Point], settings: Settings
) -> tuple[Path, ...]:
    from ragged_shard.planner.plot import layout_figure, padding_figure, save

    folder.mkdir(parents=True, exist_ok=True)
    stem = Path(model.name).resolve().name.removesuffix(".json")
    title = f"{stem}: padding against FSDP group size"
    padding = save(padding_figure(points, title), folder / f"{stem}-padding")
    readable = [point for point in points if point.world_size <= READABLE]
    if readable:
        shown = max(readable, key=lambda point: point.worst.padding_ratio)
    else:
        shown = min(points, key=lambda point: (point.world_size, -point.rows))
    layout = plan_group(model, shown.worst.name, shown, settings)
    where = f"{shown.world_size:,} ranks, blocks of {rows(shown.rows)}"
    title = f"{stem}, {shown.worst.name}: {where}"
    return padding + save(layout_figure(layout, title), folder / f"{stem}-layout")


if __name__ == "__main__":
    sys.exit(main())
