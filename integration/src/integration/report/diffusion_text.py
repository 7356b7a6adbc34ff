"""The section on images: its sentences and rows, the same for every form."""

from dataclasses import dataclass

from integration.compare.results import DiffusionResult, SystemResult, Verdict
from integration.models import model_shape
from integration.report.formatting import ABSENT, out_of_tolerance, scientific, size
from integration.report.system_rows import SystemRow, rows


@dataclass(frozen=True)
class DiffusionText:
    """What the section says above its figure, and below its table."""

    subject: str
    note: str


@dataclass(frozen=True)
class DiffusionRow:
    """One run: what a row says of a system, and how many of its images were recognised."""

    run: SystemRow
    recognised: str


def diffusion_finding(result: DiffusionResult | None) -> str:
    """Return what was found: what is wrong first, then how close losses and images are."""
    if result is None:
        return ""
    sentences = [_trouble(result, run) for run in result.runs if not run.verdict.passes]
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
            "Images drawn by both from the same noise differ by at most"
            f" {scientific(result.difference)} of a pixel's range of 2."
        )
    return " ".join(sentences)


def diffusion_text(result: DiffusionResult) -> DiffusionText:
    """Return the sentences around the figure and the table."""
    summary = next((run.summary for run in result.runs if run.summary is not None), None)
    model, steps, data = result.model, "", "images"
    if summary is not None:
        model += size(summary.parameters)
        steps = f" for {summary.steps} steps"
        data = summary.data_source
    later = ""
    if result.whole is not None and result.difference is not None:
        later = (
            " Later steps amplify rounding, up to"
            f" {scientific(result.whole.maximum)} at step {result.whole.step}, and so the images"
            f" differ, by at most {scientific(result.difference)} of a pixel's range from -1 to 1:"
            " both are shown and not judged."
        )
    return DiffusionText(
        subject=(
            f"A diffusion transformer, {model}, was trained{steps} on {data}, on one device and by"
            f" {result.runs[1].system} on {result.runs[1].ranks} ranks. By the last checkpoint of"
            " each, digits were then drawn from the same noise, with DDIM and classifier-free"
            " guidance."
        ),
        note=(
            f"Δ: the loss of a step minus one device's, in squared error per pixel, over the"
            f" first {result.judged} steps, which are judged.{later} An image is"
            " recognised when the image of the data that it is nearest to is of the digit that was"
            " asked for."
        ),
    )


def diffusion_rows(result: DiffusionResult) -> list[DiffusionRow]:
    """Return a printable row per run."""
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


def _trouble(result: DiffusionResult, run: SystemResult) -> str:
    name = f"{result.model} by {run.system}"
    if run.failure is not None:
        return f"{name} {run.failure.reason}; see {run.failure.log.name}."
    if run.deviation is None:
        return f"{name} has no single device to be compared with."
    return out_of_tolerance(
        name, run.deviation, run.tolerance, unit=model_shape(result.model).loss_unit
    )
