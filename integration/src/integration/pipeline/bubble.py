"""``python -m integration.pipeline.bubble``: measures the bubble of each pipeline schedule.

Every rank records the CPU time of its actions. Replayed in their order with a processor for each
rank and free communication (`timeline`), they give the idle share of the ranks' time. On 2 ranks
the wall clock gives it too, including communication and other load of the machine.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.distributed.device_mesh import init_device_mesh

from integration.models import LlamaShape, build_model, build_model_on_meta
from integration.pipeline.families import family_of
from integration.pipeline.rank_pipeline import PipelineOptions, RankPipeline, make_layout
from integration.pipeline.schedules import SCHEDULES, PipelineSchedule
from integration.pipeline.split import even_split
from integration.pipeline.timeline import (
    BACKWARD,
    BACKWARD_OF_INPUTS,
    BACKWARD_OF_WEIGHTS,
    FORWARD,
    Action,
    TimedStage,
    Timeline,
    median_step,
    replay,
)
from integration.report.command_output import ProgressBar, print_result, to_json
from integration.report.figures import new_figure, save_png, style_axes
from integration.report.markdown import render_table
from integration.report.palette import LIGHT, Theme
from integration.report.section import Column, Table
from integration.systems import get_system

# Eight layers for up to eight stages; embedding and head are small in comparison.
SHAPE = LlamaShape(
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=32,
)
_SEQUENCE = 128


@dataclass(frozen=True)
class Bubble:
    """The idle share of one schedule.

    Attributes:
        ranks: K.
        microbatches: M.
        per_rank: V, the stages of a rank.
        expected: idle share by the schedule's paper, for equal stages.
        measured: idle share of the replayed actions.
        wall: idle share by the wall clock of a step.
    """

    schedule: str
    ranks: int
    microbatches: int
    per_rank: int
    expected: float | None
    measured: float
    wall: float


@dataclass(frozen=True)
class RankLog:
    """The actions of one rank in each step, and the wall-clock seconds of the steps."""

    steps: tuple[tuple[Action, ...], ...]
    walls: tuple[float, ...]


def measure(
    schedule: PipelineSchedule, ranks: int, microbatches: int, steps: int
) -> tuple[Bubble, Timeline]:
    """Runs a schedule on ``ranks`` gloo processes and returns its bubble, and a step's timeline."""
    from testkit import run_ranks

    logs: list[RankLog] = run_ranks(
        _run_rank, ranks, schedule.name, microbatches, steps, timeout=600
    )
    timeline = replay([median_step(log.steps) for log in logs])
    busy = sum(action.seconds for log in logs for step in log.steps for action in step) / steps
    wall = median(max(walls) for walls in zip(*(log.walls for log in logs), strict=True))
    per_rank = schedule.stages_per_rank or 2
    expected = expected_bubble(schedule.name, ranks, microbatches, per_rank)
    bubble = Bubble(
        schedule=schedule.name,
        ranks=ranks,
        microbatches=microbatches,
        per_rank=per_rank,
        expected=expected,
        measured=timeline.bubble,
        wall=1 - busy / (ranks * wall),
    )
    return bubble, timeline


def _run_rank(name: str, microbatches: int, steps: int) -> RankLog:
    torch.set_num_threads(1)
    ranks, schedule = dist.get_world_size(), SCHEDULES[name]
    chain = family_of(meta := build_model_on_meta(SHAPE)).chain(meta)
    points = even_split(chain, schedule.stages(ranks, None), ends=0)
    layout = make_layout(PipelineOptions(ranks, points, schedule, microbatches), meta)
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("pp", "dp"))
    model = build_model(SHAPE, seed=0)
    pipeline = RankPipeline(layout, get_system("single"), model, SHAPE, mesh, TimedStage)
    tokens = torch.randint(SHAPE.vocab_size, (microbatches, _SEQUENCE))
    batch = {"input_ids": tokens, "labels": tokens}
    pipeline.prepare(batch)
    log: list[Action] = []
    for stage in pipeline.stages:
        assert isinstance(stage, TimedStage)
        stage.log = log
    found: list[tuple[Action, ...]] = []
    walls: list[float] = []
    for _ in range(steps + 1):
        log.clear()
        dist.barrier()
        started = time.perf_counter()
        pipeline.forward_backward(batch, 1, last=True)
        walls.append(time.perf_counter() - started)
        found.append(tuple(log))
        pipeline.model.zero_grad()
    # In the first step stages also exchange the shapes that they send.
    return RankLog(tuple(found[1:]), tuple(walls[1:]))


def expected_bubble(schedule: str, ranks: int, microbatches: int, per_rank: int) -> float | None:
    """Returns the idle share of the ranks' time for stages of equal duration.

    The halves of a split backward take as long as a forward each; communication takes no time.

    Sources: GPipe (arXiv 1811.06965), section 2.3, and 1F1B; interleaved 1F1B of Megatron-LM (arXiv
    2104.04473), section 2.2; zero bubble (arXiv 2401.10241), table 2, ZB-H1, interleaved, and
    section 6, ZB-V; DualPipeV, the table in github.com/deepseek-ai/DualPipe.

    Args:
        schedule: name of the schedule.
        ranks: K.
        microbatches: M.
        per_rank: V, the stages of a rank.
    """
    wait, work = ranks - 1, per_rank * microbatches
    if schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
        return wait / (work + wait)
    if schedule == "InterleavedZeroBubble":
        return wait / (3 * work + wait)  # (K - 1) (F + I - W) of (F + I + W) V M
    if schedule == "ZBVZeroBubble":
        return 0.0
    if schedule == "DualPipeV":
        return 2 * wait / (3 * work + 2 * wait)  # (K - 1) (F&B + B - 3 W), F&B = F + I + W
    return None


def bubble_table(bubbles: Sequence[Bubble]) -> Table:
    """Returns a row per bubble; wall-clock times of more ranks than cores are left out."""
    titles = ("ranks K", "stages each V", "microbatches M", "expected", "measured", "wall")
    rows = [
        (
            each.schedule,
            str(each.ranks),
            str(each.per_rank),
            str(each.microbatches),
            "" if each.expected is None else f"{each.expected:.1%}",
            f"{each.measured:.1%}",
            f"{each.wall:.1%}" if each.ranks <= 2 else "",
        )
        for each in bubbles
    ]
    numbers = (Column(title, is_number=True) for title in titles)
    return Table((Column("schedule"), *numbers), tuple(rows))


def result(bubbles: Sequence[Bubble]) -> str:
    """Returns the bubble that differs most from its formula, as a sentence."""
    known = [(abs(each.measured - each.expected), each) for each in bubbles
             if each.expected is not None]  # fmt: skip
    if not known:
        return f"{len(bubbles)} schedules measured; their papers have no formula."
    difference, each = max(known, key=lambda pair: pair[0])
    return (
        f"The idle share differs from its formula by at most {difference:.1%}, of"
        f" {each.schedule} on {each.ranks} ranks."
    )


_ACTION_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_OF_INPUTS: "backward of inputs",
    BACKWARD_OF_WEIGHTS: "backward of weights",
}


def draw_timelines(timelines: Mapping[str, Timeline], theme: Theme) -> Figure:
    """Returns the figure: a panel per schedule, with a line per rank.

    A rank's stages after its first are lighter; numbers are microbatches.
    """
    ranks = max(timeline.ranks for timeline in timelines.values())
    figure = new_figure(theme, len(timelines) * (0.62 + 0.27 * ranks) + 0.5)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    colours = dict(zip(_ACTION_NAMES, theme.series, strict=False))
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        style_axes(axes, theme, f"{name}: {timeline.bubble:.1%} idle", grid_axis="x")
        for span in timeline.spans:
            action, width = span.action, span.action.seconds * 1e3
            axes.barh(
                span.rank, width, left=span.start * 1e3, height=0.86,
                color=colours[action.kind], alpha=1.0 if action.stage < timeline.ranks else 0.62,
                edgecolor=theme.background, linewidth=0.6,
            )  # fmt: skip
            if width > 0.01 * timeline.seconds * 1e3:  # the first stage has no inputs' gradients
                axes.text(
                    span.start * 1e3 + width / 2, span.rank, str(action.microbatch),
                    ha="center", va="center", fontsize=6, color=theme.background, clip_on=True,
                )  # fmt: skip
        axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
        axes.invert_yaxis()
    panels[-1].set_xlabel("ms, with one processor per rank")
    figure.legend(
        handles=[Patch(color=colours[kind], label=label) for kind, label in _ACTION_NAMES.items()],
        loc="outside lower center", ncols=4, frameon=False, labelcolor=theme.ink, fontsize=9.5,
    )  # fmt: skip
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures all schedules, prints the table, and writes it with the timelines to ``--out``."""
    parser = argparse.ArgumentParser(
        prog="python -m integration.pipeline.bubble",
        description="Measures the idle share of every pipeline schedule beside its formula.",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[1, 2, 4])
    parser.add_argument("--microbatches", type=int, default=8, help="8 or a multiple of it")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--out", type=Path, help="folder for bubble.json and figures")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.microbatches < 8 or options.microbatches % 8:
        parser.error("--steps is at least 1, and --microbatches a multiple of 8")
    bubbles: list[Bubble] = []
    timelines: dict[int, dict[str, Timeline]] = {}
    cases = [(ranks, name) for ranks in options.ranks for name in options.schedules]
    with ProgressBar() as bar:
        for number, (ranks, name) in enumerate(cases, 1):
            bar.begin(f"{name} on {ranks} ranks", number, len(cases))
            bubble, timeline = measure(SCHEDULES[name], ranks, options.microbatches, options.steps)
            bubbles.append(bubble)
            timelines.setdefault(ranks, {})[name] = timeline
    rows = [asdict(bubble) for bubble in bubbles]
    if not options.json:
        print(render_table(bubble_table(bubbles)))
    print_result(result(bubbles), rows, as_json=options.json)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bubble.json").write_text(to_json(rows) + "\n")
        for ranks, drawn in timelines.items():
            save_png(draw_timelines(drawn, LIGHT), options.out / f"bubble-{ranks}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
