"""The report's sentences and numbers, the same for every form it is written in."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare.cost import WARM_UP_STEPS
from integration.compare.results import Results, SystemResult, Verdict
from integration.compare.setup import Comparison
from integration.report.optimizer_wording import optimizer_finding
from integration.report.parallel_wording import parallel_finding
from integration.report.phrases import listed, out_of_tolerance, scientific, size
from integration.report.picture_wording import picture_finding
from integration.report.random_wording import random_finding


@dataclass(frozen=True)
class PageText:
    """What a report says above its figures and tables.

    Attributes:
        verdict: two or three words.
        finding: what came out.
        subject: what was compared.
        cost_note: how the times and the memory were measured, and their limits.
    """

    title: str
    passes: bool
    verdict: str
    finding: str
    subject: str
    cost_note: str


def page_text(comparison: Comparison, results: Results) -> PageText:
    """Return the sentences for a comparison's results."""
    return PageText(
        title="Every system against one device",
        passes=results.passes,
        verdict="Passes" if results.passes else "Does not pass",
        finding=whole_finding(results),
        subject=_subject(comparison, results.systems),
        cost_note=_cost_note(comparison),
    )


def whole_finding(results: Results) -> str:
    """Return what was found of the systems, then what of everything else."""
    sections = (
        finding(results.systems),
        random_finding(results.random_numbers),
        optimizer_finding(results.optimizers),
        parallel_finding(results.parallelism),
        picture_finding(results.pictures),
    )
    return " ".join(section for section in sections if section)


def finding(results: Sequence[SystemResult]) -> str:
    """Return what was found of the systems: what is wrong first, then what is right."""
    reference = results[0]
    if reference.failure is not None:
        return (
            f"The reference run, {reference.system}, {reference.failure.reason},"
            " so that no curve could be compared."
        )
    sentences = [_trouble(result) for result in results if not result.verdict.passes]
    equal = [each.system for each in results if each.verdict is Verdict.EQUAL]
    within = [each for each in results if each.verdict is Verdict.WITHIN]
    if within:
        worst = max(within, key=lambda each: each.deviation.maximum if each.deviation else 0.0)
        assert worst.deviation is not None
        sentences.append(
            f"{_stays(within)} within tolerance of the single device; the largest difference is"
            f" {scientific(worst.deviation.maximum)} nats per token"
            f" ({f'{worst.system}, ' if len(within) > 1 else ''}step {worst.deviation.step})."
        )
    if equal:
        verb = "is" if len(equal) == 1 else "are"
        sentences.append(
            f"{listed(equal)} {verb} bitwise equal to the single device at every step."
        )
    return " ".join(sentences)


def _trouble(result: SystemResult) -> str:
    if result.failure is not None:
        return f"{result.system} {result.failure.reason}; see {result.failure.log.name}."
    assert result.deviation is not None
    return out_of_tolerance(result.system, result.deviation, result.tolerance)


def _stays(within: Sequence[SystemResult]) -> str:
    verb = "stays" if len(within) == 1 else "stay"
    return f"{listed([each.system for each in within])} {verb}"


def _subject(comparison: Comparison, results: Sequence[SystemResult]) -> str:
    options = comparison.options
    summary = next((each.summary for each in results if each.summary is not None), None)
    model = options.model if summary is None else f"{options.model}{size(summary.parameters)}"
    others = listed([job.system for job in comparison.jobs[1:]])
    return (
        f"The same unmodified model, {model}, was trained in fp32 on"
        f" {comparison.data.source} for {options.steps} steps: once on a single"
        f" device, and once each under {others}. Every run started from the same weights and saw"
        f" the same {options.global_batch} samples in every"
        " step, so any difference between the curves comes from how the system ran the model."
    )


def _cost_note(comparison: Comparison) -> str:
    ranks = max(job.ranks for job in comparison.jobs)
    threads = comparison.options.threads
    cores = os.cpu_count() or 1
    per_rank = "one thread" if threads == 1 else f"{threads} threads"
    sharing = f"so {ranks} ranks compute with {ranks} times the threads of the single device"
    if ranks * threads > cores:
        sharing = f"but there are only {cores} cores, so step times say little"
    return (
        f"Step time is the median wall time on the first rank, without the first {WARM_UP_STEPS}"
        " steps; whiskers span the middle half of the steps. Memory is each rank's peak resident"
        " set, Python and torch included; the tick is the largest rank. All ranks run on this"
        f" machine and talk over gloo; each has {per_rank}, {sharing}. Whatever else ran on the"
        " machine is in these times too."
    )
