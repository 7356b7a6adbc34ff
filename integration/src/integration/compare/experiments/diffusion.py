"""A diffusion transformer on one device and sharded, and the images that each generates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure
from torch import Tensor

from integration.compare.curves import difference_lines, draw_curves, name_steps
from integration.compare.experiment import Experiment, Findings, Setting
from integration.compare.result import Result
from integration.compare.rows import (
    LOSS_COLUMNS,
    MICROBATCHES,
    SYSTEM,
    number,
    results_table,
    trained,
    verdict_row,
)
from integration.compare.run import Run
from integration.compare.variants import REFERENCE, Variant, get_variant
from integration.data import Digits
from integration.data.digits import CLASSES
from integration.errors import UsageError
from integration.models import DiTShape, model_shape
from integration.report.difference_axes import DifferencePanel, draw_differences
from integration.report.diffusion_figure import draw_grid
from integration.report.figures import WIDTH_INCHES, new_figure, style_axes
from integration.report.formatting import ABSENT, scientific
from integration.report.palette import Theme
from integration.report.section import Figure, Paragraph, Section
from integration.sampling import Sampling, digits_in_turn, load_dit, sample
from integration.train.checkpoint import checkpoint

SHARDED = "plan-tp-sp-static"
# Generated images of each digit.
SAMPLES = 6
# First steps, whose losses must be one device's; later ones show how rounding is amplified.
JUDGED = 50
# A DiT learns digits within hundreds of steps with these, but not with the batch size and the
# learning rate of the language models.
_BATCH = 64
_LEARNING_RATE = 8e-3
_WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class DiffusionOptions:
    """The options of the comparison of generated images."""

    model: str = "dit-small"
    """Model of the comparison of generated images."""
    steps: int = 450
    """Optimizer steps of each run of that comparison; digits need about the default number."""


@dataclass(frozen=True)
class GeneratedImages:
    """Images generated from the checkpoint of one run.

    Attributes:
        images: (samples * 10, 1, 8, 8) fp32 in [-1, 1], classes in turn.
        recognised: number of images whose nearest real image has the requested class.
    """

    system: str
    images: Tensor
    recognised: int


@dataclass(frozen=True)
class Pictures:
    """The images of the experiment.

    Attributes:
        real: real images, as many as each run generates, and in the same order.
        drawn: generated images of the runs that finished, in their order.
    """

    real: Tensor
    drawn: Sequence[GeneratedImages]

    @property
    def difference(self) -> float | None:
        """The largest difference of a pixel between two runs, of a range of 2."""
        if len(self.drawn) < 2:
            return None
        return float((self.drawn[1].images - self.drawn[0].images).abs().max())

    def recognised(self, result: Result) -> str:
        """Returns how many images of a run were recognised, of how many."""
        found = [each.recognised for each in self.drawn if each.system == result.system]
        return f"{found[0]} of {len(self.real)}" if found else ABSENT


def _runs(setting: Setting[DiffusionOptions]) -> tuple[Run, ...]:
    model = setting.own.model
    shape = model_shape(model)
    if not isinstance(shape, DiTShape):
        raise UsageError(
            f"{setting.option('model')}: expected a DiT, got {model}, which generates no images;"
            " give one such as dit-small, or leave diffusion out of --experiments"
        )
    variants = [get_variant(name) for name in (REFERENCE, SHARDED)]
    for variant in variants:
        variant.make().check(variant.ranks, shape)
    return tuple(_run(setting, variant, shape) for variant in variants)


def _run(setting: Setting[DiffusionOptions], variant: Variant, shape: DiTShape) -> Run:
    steps = setting.own.steps
    choices = variant.choices | {
        "model": setting.own.model,
        "steps": steps,
        "global_batch": _BATCH,
        "micro_batch": _BATCH // variant.data_parallel_degree,
        "learning_rate": _LEARNING_RATE,
        "weight_decay": _WEIGHT_DECAY,
        "warmup_steps": steps // 20,
        "decay_steps": steps // 2,
        "final_checkpoint": True,
    }
    return Run(
        job=setting.job(f"diffusion-{variant.name}", choices, system=variant.name),
        title=f"{setting.own.model} by {variant.name}",
        tolerance=shape.tolerance,
        reference=None if variant.name == REFERENCE else f"diffusion-{REFERENCE}",
        first_steps=min(JUDGED, steps),
    )


def _report(setting: Setting[DiffusionOptions], results: Sequence[Result]) -> Findings:
    model = setting.own.model
    pictures = draw_pictures(results)
    recognised = number("recognised", pictures.recognised, terminal="recognised")
    figure = Figure(
        "diffusion",
        "Real images, and digits that each run generates from the same noise; losses by step",
        lambda theme: draw_diffusion(results, pictures, theme),
    )
    contents = (
        Paragraph(_subject(setting, results)),
        figure,
        results_table(results, SYSTEM, *LOSS_COLUMNS, MICROBATCHES, recognised),
        Paragraph(_note(results, pictures), is_note=True),
    )
    finding = ""
    if pictures.difference is not None:
        finding = (
            "Pixels of the images that both generate from the same noise differ by at most"
            f" {scientific(pictures.difference)}, of a range of 2, without a verdict."
        )
    row = verdict_row(f"{model}, first {results[0].run.first_steps} steps", results)
    verdict = replace(row, finding=f"{row.finding} {finding}".strip())
    numbers = {
        "images": len(pictures.real),
        "recognised": {each.system: each.recognised for each in pictures.drawn},
        "difference": pictures.difference,
    }
    return Findings([Section("Diffusion", contents, (verdict,))], numbers)


def draw_pictures(results: Sequence[Result]) -> Pictures:
    """Returns real images, and those that the checkpoint of every finished run generates."""
    digits = Digits(seed=0)
    classes = digits_in_turn(SAMPLES)
    finished = [each for each in results if each.failure is None]
    places = [torch.nonzero(digits.classes == digit)[:SAMPLES, 0] for digit in range(CLASSES)]
    real = digits.images[torch.stack(places, dim=1).flatten()]
    return Pictures(real, [_generate(each, classes, digits) for each in finished])


def _generate(result: Result, classes: Tensor, digits: Digits) -> GeneratedImages:
    folder = result.run.job.folder
    found = checkpoint.newest_complete(folder).path
    assert found is not None, f"{folder} ended well without a checkpoint"
    images = sample(load_dit(found), classes, Sampling())
    recognised = int((nearest_class(images, digits) == classes).sum())
    return GeneratedImages(result.system, images, recognised)


def nearest_class(images: Tensor, digits: Digits) -> Tensor:
    """Returns the class of the real image nearest to each generated one, (images,) int64.

    Leave-one-out, it classifies 98.8% of the real images correctly.
    """
    distances = torch.cdist(images.flatten(1), digits.images.flatten(1))
    return digits.classes[distances.argmin(dim=1)]


def draw_diffusion(results: Sequence[Result], pictures: Pictures, theme: Theme) -> MatplotlibFigure:
    """Returns the figure: real and generated images above losses and their differences."""
    grids = [("real images", pictures.real)]
    grids += [(f"generated by {drawn.system}", drawn.images) for drawn in pictures.drawn]
    columns = 1 + len(results)
    height = SAMPLES * WIDTH_INCHES / (CLASSES * columns)
    figure = new_figure(theme, height + 4.2)
    above, below = figure.subfigures(2, 1, height_ratios=[height + 0.6, 3.6], squeeze=False)[:, 0]
    for part in (above, below):
        part.set_facecolor(theme.background)
    cells = above.subplots(1, columns, squeeze=False)[0]
    for axes, (title, images) in zip(cells, grids, strict=False):
        draw_grid(axes, images, theme)
        axes.set_title(title, loc="left", color=theme.ink, fontsize=11, fontweight="bold", pad=8)
    for axes in cells[len(grids) :]:
        axes.set_axis_off()
    losses, differences = below.subplots(1, 2)
    _draw_losses(losses, differences, results, theme)
    return figure


def _draw_losses(losses: Axes, differences: Axes, results: Sequence[Result], theme: Theme) -> None:
    model, run = results[1].model, results[1].run
    style_axes(losses, theme, f"{model}: loss, squared error per pixel", grid_axis="y")
    style_axes(differences, theme, "|loss - loss of the single device|", grid_axis="y")
    draw_curves(losses, results, theme)
    draw_differences([DifferencePanel(differences, difference_lines(results, theme))], (), theme)
    assert run.first_steps is not None
    _draw_judged(differences, run.tolerance, run.first_steps, theme)
    for axes in (losses, differences):
        name_steps(axes)


def _draw_judged(axes: Axes, tolerance: float, steps: int, theme: Theme) -> None:
    """Draws the tolerance over the steps to which it applies."""
    axes.plot([1, steps], [tolerance] * 2, color=theme.ink, linewidth=1.1, linestyle=(0, (5, 3)))
    axes.annotate(
        f"tolerance {scientific(tolerance)}, to step {steps}",
        (1, tolerance),
        xytext=(0, 4),
        textcoords="offset points",
        color=theme.ink,
        fontsize=9.5,
    )
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, max(top, 10 * tolerance))


def _subject(setting: Setting[DiffusionOptions], results: Sequence[Result]) -> str:
    sharded = results[1].run.job
    return (
        f"A diffusion transformer, {trained(results, setting.own.model)}, was trained for"
        f" {setting.own.steps} steps on {Digits.source}, on one device and by {sharded.system} on"
        f" {sharded.ranks} ranks. The last checkpoint of each then generated digits from the same"
        " noise, by DDIM with classifier-free guidance."
    )


def _note(results: Sequence[Result], pictures: Pictures) -> str:
    whole, later = results[1].whole, ""
    if whole is not None and pictures.difference is not None:
        later = (
            " Later steps amplify rounding: losses differ by up to"
            f" {scientific(whole.maximum)} (step {whole.step}), and pixels, whose range is -1 to 1,"
            f" by up to {scientific(pictures.difference)}. These differences are shown without a"
            " verdict."
        )
    return (
        "Δ: the loss of a step minus one device's, in squared error per pixel, over the first"
        f" {results[1].run.first_steps} steps, which decide the verdict.{later} A generated image"
        " counts as recognised if the real image nearest to it shows the requested digit."
    )


EXPERIMENT = Experiment(
    name="diffusion",
    order=5,
    quick=DiffusionOptions(),
    full=DiffusionOptions(),
    runs=_runs,
    report=_report,
)
