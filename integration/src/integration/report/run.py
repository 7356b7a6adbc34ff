"""``python -m integration.report.run RUN``: a report of one run, with its curves and samples.

Writes report.html, report.md and figures into the run folder, or into ``--out``.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import tyro
from matplotlib.figure import Figure as MatplotlibFigure

from integration.data import Modality
from integration.errors import EXIT_USAGE, UsageError
from integration.models import shape_from
from integration.report.command_output import ProgressBar, print_result
from integration.report.figures import new_figure, style_axes
from integration.report.palette import Theme
from integration.report.section import (
    Column,
    Figure,
    LogExcerpt,
    Paragraph,
    ReportPage,
    Section,
    Table,
)
from integration.report.write import write_report
from integration.sampling.text import TextSampling, generate, load_text_model
from integration.train.checkpoint import checkpoint
from integration.train.folders import make_folder, require_folder
from integration.train.metrics import (
    SUMMARY_FILE,
    RunStart,
    RunSummary,
    StepRecord,
    read_metrics,
    read_starts,
    read_summary,
)

# Means of so many parts of the run are drawn.
_POINTS = 200


@dataclass(frozen=True)
class ReportOptions:
    """The options of the command."""

    run: tyro.conf.Positional[Path]
    """Run folder of a finished run."""
    out: Path | None = None
    """Folder to write; by default the run folder."""
    prompts: tuple[str, ...] = ("", "def ", "class ")
    """Texts that a language model continues; an empty one is the beginning of a document."""
    max_tokens: int = 200
    """Tokens of a sample at most."""
    temperature: float = 0.8
    """Divides the logits before sampling; 0 takes the most probable token."""
    seed: int = 0
    """Seed of the first sample; the next ones have the next numbers."""
    json: bool = False
    """Print the summary of the run and the path of its report as JSON."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a usage error."""
    try:
        options = tyro.cli(
            ReportOptions,
            prog="python -m integration.report.run",
            description=__doc__,
            args=arguments,
        )
        report = write_run_report(options)
        summary = read_summary(options.run)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    document = {"report": report, "run": options.run, "summary": asdict(summary)}
    sentence = f"report of {summary.steps:,} steps of {summary.model}: {report}"
    print_result(sentence, document, as_json=options.json)
    return 0


def write_run_report(options: ReportOptions) -> Path:
    """Writes the report of a run and returns the path of report.html.

    Raises:
        UsageError: the run is not finished, or a folder or an option is invalid.
    """
    run, out = options.run, options.out or options.run
    if not (run / SUMMARY_FILE).exists():
        raise UsageError(
            f"expected the folder of a finished run, got {run} without {SUMMARY_FILE}; give"
            " another, or finish the run"
        )
    require_folder(out)
    summary, records = read_summary(run), read_metrics(run)
    sections = [_training(summary, records), _products(read_starts(run))]
    sections += _samples(checkpoint.newest_complete(run).path, options)
    make_folder(out)
    return write_report(ReportPage(f"Training of {summary.model}", tuple(sections)), out)


def _training(summary: RunSummary, records: Sequence[StepRecord]) -> Section:
    facts = [
        ("model", f"{summary.model}, {summary.parameters / 1e6:.1f} M parameters"),
        ("data", summary.data_source),
        ("steps", f"{summary.steps:,}"),
        ("tokens", f"{sum(record.tokens for record in records):,}"),
        ("time of steps", f"{sum(record.seconds for record in records) / 60:,.1f} minutes"),
        ("loss of the last step", f"{records[-1].loss:.4f}"),
    ]
    if summary.eval_loss is not None:
        facts.append(("loss of held-out samples", f"{summary.eval_loss:.4f}"))
    if summary.eval_perplexity is not None:
        facts.append(("perplexity of held-out samples", f"{summary.eval_perplexity:.2f}"))
    curves = Figure(
        "loss",
        "The loss of training and of held-out samples over the steps",
        partial(_draw, records),
    )
    return Section("Training", (Table((Column(""), Column("")), tuple(facts)), curves))


def _products(starts: Sequence[RunStart]) -> Section:
    columns = (Column("from step", is_number=True), Column("system"), Column("ranks", True))
    rows = tuple((f"{each.step + 1:,}", each.system, f"{each.world_size}") for each in starts)
    text = "Each start of the run; all but the first resume from a checkpoint."
    return Section("Products of parallelism", (Paragraph(text), Table(columns, rows)))


def _samples(path: Path | None, options: ReportOptions) -> list[Section]:
    """Returns the section of sampled texts; none without a checkpoint of a language model."""
    if path is None:
        return []
    if shape_from(checkpoint.read_manifest(path).identity.model).modality is not Modality.TEXT:
        return []
    decoder, texts = load_text_model(path), []
    with ProgressBar() as bar:
        for number, prompt in enumerate(options.prompts):
            bar.show("sampling", number, len(options.prompts))
            how = TextSampling(prompt, options.max_tokens, options.temperature)
            texts += generate(decoder, how, samples=1, seed=options.seed + number)
    head = Paragraph(
        f"By the checkpoint `{path.name}`, at temperature {options.temperature:g}, with seeds from"
        f" {options.seed}; the prompts are {', '.join(f'`{each!r}`' for each in options.prompts)}."
    )
    return [Section("Samples", (head, *map(LogExcerpt, texts)))]


def _draw(records: Sequence[StepRecord], theme: Theme) -> MatplotlibFigure:
    figure = new_figure(theme, 4.5)
    axes = figure.subplots()
    style_axes(axes, theme, "Loss", grid_axis="y")
    length = -(-len(records) // _POINTS)
    parts = [records[start : start + length] for start in range(0, len(records), length)]
    label = "training" if length == 1 else f"training, means of {length} steps"
    axes.plot(
        [sum(each.step for each in part) / len(part) for part in parts],
        [sum(each.loss for each in part) / len(part) for part in parts],
        color=theme.reference,
        linewidth=1.5,
        label=label,
    )
    evaluated = {each.step: each.eval_loss for each in records if each.eval_loss is not None}
    if evaluated:
        axes.plot(
            list(evaluated),
            list(evaluated.values()),
            color=theme.series[0],
            linewidth=1.5,
            marker="o",
            markersize=4,
            label="held-out samples",
        )
    axes.set_xlabel("optimizer step")
    axes.legend(frameon=False, labelcolor=theme.ink, fontsize=10, loc="upper right")
    return figure


if __name__ == "__main__":
    sys.exit(main())
