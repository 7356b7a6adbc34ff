"""Runs the planner's command line: plans, prints a table, and writes JSON and pictures.

It needs the standard library; rich draws better tables, matplotlib draws pictures, and
``--from-model`` needs transformers. The exit status is 0, or 2 after one sentence on stderr that
states the error.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ragged_shard.planner.command_line.arguments import PlannerOptions, fail, parse
from ragged_shard.planner.command_line.output import plain_table, print_table, to_json
from ragged_shard.planner.command_line.sweep import (
    SweepPoint,
    SweepSettings,
    plan_group,
    recommend,
    rows,
    sweep,
)
from ragged_shard.planner.models.config import load_config
from ragged_shard.planner.models.hugging_face import build_model
from ragged_shard.planner.models.presets import preset_model
from ragged_shard.planner.models.shapes import ModelShapes, resolve_target

#: The largest world size whose layout is drawn by choice; with more ranks it cannot be read.
READABLE = 32
EXTRA = "pip install ragged-shard[plot]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line with ``arguments``, by default the process's; returns the status.

    Raises:
        SystemExit: With status 2, after one sentence on stderr, on bad input and where a file
            cannot be read or written; with 0 after ``--help``.
    """
    options = parse(arguments)
    try:
        run(options)
    except BrokenPipeError:
        # The reader has closed the pipe, as `| head` does; exit must not write either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        fail(error)
    return 0


def run(options: PlannerOptions) -> None:
    """Plans the layouts, and prints and writes the output that the options select.

    Raises:
        ValueError: The model or the numbers are invalid, or a library is missing.
        OSError: A file cannot be written.
    """
    if options.plot is not None:
        _check_matplotlib()  # before the table, not after it
    model = _model(options)
    # Before one group is selected: in a group without experts, "experts" matches nothing.
    target = resolve_target(model, options.target)
    settings = SweepSettings(target, options.order, options.alignment)
    if options.group is not None:
        model = model.only(options.group)
    points = sweep(model, options.world_sizes, options.rows, settings)
    _print_header(model, settings)
    _print_table(points)
    recommendations = recommend(points, tolerance=options.tolerance) if options.recommend else ()
    for recommendation in recommendations:
        print(recommendation.sentence())
    if options.explain:
        worst = max(points, key=lambda point: point.worst.padding_ratio)
        layout = plan_group(model, worst.worst.name, worst, settings)
        print(f"{worst.worst.name}, {worst.world_size:,} ranks, {rows(worst.rows)}:")
        print(layout.explain())
    if options.json is not None:
        options.json.write_text(to_json(model, settings, points, recommendations) + "\n")
        print(f"wrote {options.json}")
    if options.plot is not None:
        for path in _plot(options.plot, model, points, settings):
            print(f"wrote {path}")
    sys.stdout.flush()


def _model(options: PlannerOptions) -> ModelShapes:
    if options.preset is not None:
        return preset_model(options.preset, experts=options.experts, with_mtp=options.mtp)
    config = load_config(str(options.from_model))
    return build_model(config, experts=options.experts, with_mtp=options.mtp)


def _print_header(model: ModelShapes, settings: SweepSettings) -> None:
    first, last = model.groups[0].name, model.groups[-1].name
    groups = f"group {first}" if first == last else f"{len(model.groups)} groups"
    blocked = {"experts": "expert matrices", "all": "all matrices"}.get(
        settings.target, f"matrices matching {settings.target!r}"
    )
    multiple = f"; shards of a multiple of {settings.alignment:,}" if settings.alignment > 1 else ""
    print(f"{model.name}: {model.numel:,} parameters in {groups}; sizes in elements")
    print(f"blocks of rows in {blocked}; tensors in the order {settings.order!r}{multiple}")


def _print_table(points: Sequence[SweepPoint]) -> None:
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
    folder: Path, model: ModelShapes, points: Sequence[SweepPoint], settings: SweepSettings
) -> tuple[Path, ...]:
    from ragged_shard.planner.command_line.plot import layout_figure, padding_figure, save

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
