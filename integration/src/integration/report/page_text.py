"""The report's title, verdict and paragraphs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare.cost import WARM_UP_STEPS
from integration.compare.results import Results, SystemResult, Verdict, by_model
from integration.compare.setup import Comparison
from integration.compare.variants import REFERENCE
from integration.report.diffusion_text import diffusion_finding
from integration.report.formatting import (
    TIMES,
    listed,
    loss_unit,
    scientific,
    size,
)
from integration.report.optimizer_text import optimizer_finding
from integration.report.parallel_text import parallel_finding
from integration.report.random_text import random_finding
from integration.report.system_rows import out_of_tolerance

_WORK_NOTE = (
    f"Local microbatches: microbatches of a step on a rank {TIMES} samples of each. GFLOP: FLOPs"
    " of the matrix products and the attention that the first rank computed for one of them, on"
    f" average, in step {WARM_UP_STEPS}. Rows with equal GFLOP and equal microbatches do the same"
    " local work. Ranks of tensor parallelism take the same samples and divide the work: they have"
    " more microbatches of the same size, and GFLOP count a rank's share of sharded operators and"
    " all of replicated ones. With expert parallelism GFLOP depend on the routing. No row works"
    " around gloo: systems of torch gather DTensors with torch's functional all_gather, plans with"
    " that of dtensor-rules, which sends the same bytes."
)


@dataclass(frozen=True)
class PageText:
    """The paragraphs of a report that are not of one section.

    Attributes:
        verdict: "Passes" or "Does not pass".
        finding: the findings of all comparisons.
        subject: what was compared.
        missing: sentences on requested systems that could not run.
        work_note: definition of the local work of a row.
        cost_note: how step times, memory and collectives were measured.
    """

    title: str
    passes: bool
    verdict: str
    finding: str
    subject: str
    missing: tuple[str, ...]
    work_note: str
    cost_note: str


def page_text(comparison: Comparison, results: Results) -> PageText:
    """Returns the paragraphs on a comparison's results."""
    return PageText(
        title="Every system against one device",
        passes=results.passes,
        verdict="Passes" if results.passes else "Does not pass",
        finding=whole_finding(results),
        subject=_subject(comparison, results.systems),
        missing=tuple(f"{name} is {why}." for name, why in comparison.missing.items()),
        work_note=_WORK_NOTE,
        cost_note=_cost_note(comparison),
    )


def whole_finding(results: Results) -> str:
    """Returns the findings on the systems, then those of the other comparisons."""
    sections = (
        *(finding(same) for same in by_model(results.systems).values()),
        random_finding(results.random_numbers),
        optimizer_finding(results.optimizers),
        parallel_finding(results.parallelism),
        diffusion_finding(results.diffusion),
    )
    return " ".join(section for section in sections if section)


def finding(results: Sequence[SystemResult]) -> str:
    """Returns the findings on the systems with one model, failed comparisons first."""
    reference = results[0]
    model, unit = reference.model, loss_unit(reference.model)
    if reference.failure is not None:
        return (
            f"The reference run of {model}, {reference.system}, {reference.failure.reason};"
            " its other runs were not compared."
        )
    sentences = [_failure(result) for result in results if not result.verdict.passes]
    equal = [each.system for each in results if each.verdict is Verdict.EQUAL]
    within = [each for each in results if each.verdict is Verdict.WITHIN]
    if within:
        worst = max(within, key=lambda each: each.deviation.maximum if each.deviation else 0.0)
        assert worst.deviation is not None
        sentences.append(
            f"With {model}, {_are(within)} within {scientific(worst.tolerance)} of the single"
            f" device; the largest difference is {scientific(worst.deviation.maximum)} {unit}"
            f" ({f'{worst.system}, ' if len(within) > 1 else ''}step {worst.deviation.step})."
        )
    if equal:
        verb = "is" if len(equal) == 1 else "are"
        sentences.append(
            f"With {model}, {listed(equal)} {verb} bitwise equal to the single device at every"
            " step."
        )
    return " ".join(sentences)


def _failure(result: SystemResult) -> str:
    name = f"{result.system} with {result.model}"
    if result.failure is not None:
        return f"{name} {result.failure.reason}; see {result.failure.log.name}."
    assert result.deviation is not None
    return out_of_tolerance(name, result.deviation, result.tolerance, loss_unit(result.model))


def _are(within: Sequence[SystemResult]) -> str:
    verb = "is" if len(within) == 1 else "are"
    return f"{listed([each.system for each in within])} {verb}"


def _subject(comparison: Comparison, results: Sequence[SystemResult]) -> str:
    options = comparison.options
    models = [_sized(model, same) for model, same in by_model(results).items()]
    systems = dict.fromkeys(job.system for job in comparison.jobs)
    others = listed([system for system in systems if system != REFERENCE])
    which = f"{listed(models)} {'was' if len(models) == 1 else 'were'}"
    sources = listed([each.source for each in comparison.data])
    return (
        f"{which} trained in fp32, without changes to the model, on {sources} for {options.steps}"
        f" steps: on a single device and under {others}, as far as they support the model. Every"
        f" run of a model started from the same weights and had the same {options.global_batch}"
        " samples in every step, so that any difference between curves comes from the system."
    )


def _sized(model: str, results: Sequence[SystemResult]) -> str:
    summary = next((each.summary for each in results if each.summary is not None), None)
    return model if summary is None else f"{model}{size(summary.parameters)}"


def _cost_note(comparison: Comparison) -> str:
    ranks = max(job.ranks for job in comparison.jobs)
    shared = ""
    if comparison.options.share_processes:
        shared = (
            " The models of a system were trained one after another in the same processes: the"
            " memory of later models includes what earlier ones left allocated."
        )
    threads = comparison.options.threads
    cores = os.cpu_count() or 1
    per_rank = "one thread" if threads == 1 else f"{threads} threads"
    sharing = f"so that {ranks} ranks have {ranks} times the threads of the single device"
    if ranks * threads > cores:
        sharing = f"but there are only {cores} cores, so that step times are not meaningful"
    return (
        f"Step time is the median wall time on the first rank without the first {WARM_UP_STEPS}"
        " steps; whiskers span the first to the third quartile. Memory is the peak resident set of"
        f" a rank, Python and torch included; the tick marks the largest rank.{shared}"
        f" Collectives are those that the first rank issued in step {WARM_UP_STEPS}, with the"
        " bytes of the full tensors that they gathered, reduced, scattered or sent: an all_reduce"
        " sends about twice the bytes of a reduce_scatter of the same tensor, and sends and"
        " receives are counted separately. All ranks run on this machine and communicate over"
        f" gloo; each has {per_rank}, {sharing}. Other processes on the machine affect these times."
    )
