"""The sentences and rows of the report's section on diffusion."""

from dataclasses import dataclass

from integration.compare.results import DiffusionResult, SystemResult, Verdict
from integration.models import model_shape
from integration.report.formatting import ABSENT, scientific, size
from integration.report.system_rows import SystemRow, out_of_tolerance, rows


@dataclass(frozen=True)
class DiffusionText:
    """The paragraphs above the section's figure and below its table."""

    subject: str
    note: str


@dataclass(frozen=True)
class DiffusionRow:
    """The row of one run: its system's row, and how many of its images were recognised."""

    run: SystemRow
    recognised: str


def diffusion_finding(result: DiffusionResult | None) -> str:
    """Returns the findings: a sentence per failed comparison, then the differences."""
    if result is None:
        return ""
    sentences = [_failure(result, run) for run in result.runs if not run.verdict.passes]
    for run in result.runs[1:]:
        if run.verdict.passes:
            assert run.deviation is not None
            distance = (
                f"stays within {scientific(run.deviation.maximum)} of one device's loss for"
                f" {result.judged} steps"
                if run.verdict is Verdict.WITHIN
                else f"is bitwise equal to one device for {result.judged} steps"
            )
            sentences.append(f"{result.model} by {run.system} {distance}.")
    if result.difference is not None:
        sentences.append(
            "Pixels of the images that both generate from the same noise differ by at most"
            f" {scientific(result.difference)}, of a range of 2."
        )
    return " ".join(sentences)


def diffusion_text(result: DiffusionResult) -> DiffusionText:
    """Returns the paragraphs around the figure and the table."""
    summary = next((run.summary for run in result.runs if run.summary is not None), None)
    model, steps, data = result.model, "", "images"
    if summary is not None:
        model += size(summary.parameters)
        steps = f" for {summary.steps} steps"
        data = summary.data_source
    later = ""
    if result.whole is not None and result.difference is not None:
        later = (
            " Later steps amplify rounding: losses differ by up to"
            f" {scientific(result.whole.maximum)} (step {result.whole.step}), and pixels, whose"
            f" range is -1 to 1, by up to {scientific(result.difference)}. These differences are"
            " shown without a verdict."
        )
    return DiffusionText(
        subject=(
            f"A diffusion transformer, {model}, was trained{steps} on {data}, on one device and by"
            f" {result.runs[1].system} on {result.runs[1].ranks} ranks. The last checkpoint of each"
            " then generated digits from the same noise, by DDIM with classifier-free guidance."
        ),
        note=(
            "Δ: the loss of a step minus one device's, in squared error per pixel, over the first"
            f" {result.judged} steps, which decide the verdict.{later} A generated image counts as"
            " recognised if the real image nearest to it shows the requested digit."
        ),
    )


def diffusion_rows(result: DiffusionResult) -> list[DiffusionRow]:
    """Returns a row per run."""
    recognised = {drawn.system: drawn.recognised for drawn in result.drawn}
    return [
        DiffusionRow(
            row,
            f"{recognised[row.system]} of {len(result.real)}"
            if row.system in recognised
            else ABSENT,
        )
        for row in rows(result.runs)
    ]


def _failure(result: DiffusionResult, run: SystemResult) -> str:
    name = f"{result.model} by {run.system}"
    if run.failure is not None:
        return f"{name} {run.failure.reason}; see {run.failure.log.name}."
    if run.deviation is None:
        return f"{name} was not compared, as the run on one device failed."
    return out_of_tolerance(
        name, run.deviation, run.tolerance, unit=model_shape(result.model).loss_unit
    )
