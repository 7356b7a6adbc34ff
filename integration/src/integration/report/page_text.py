"""The report's sentences and numbers, the same for every form it is written in."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare.cost import WARM_UP_STEPS
from integration.compare.results import Results, SystemResult, Verdict, of_models
from integration.compare.setup import Comparison
from integration.compare.variants import REFERENCE
from integration.report.diffusion_text import diffusion_finding
from integration.report.formatting import (
    TIMES,
    listed,
    loss_unit,
    out_of_tolerance,
    scientific,
    size,
)
from integration.report.optimizer_text import optimizer_finding
from integration.report.parallel_text import parallel_finding
from integration.report.random_text import random_finding

_WORK_NOTE = (
    f"Local microbatches: those of a step on a rank {TIMES} the samples of each. GFLOP: of the"
    " matrix products and the attention that the first rank computed of one of them, on average, in"
    f" step {WARM_UP_STEPS}. Rows with the same of both do the same local work in a microbatch."
    " Ranks of tensor parallelism take the same samples and divide their work: their microbatches"
    " have as many samples as the others', there are more of them, and GFLOP are what a rank"
    " computes of each, its part of what is divided and the whole of what is not. Of divided"
    " experts they depend on the routing. No row has a workaround for gloo: systems of torch gather"
    " DTensors by torch's functional all_gather, plans by dtensor-rules', which sends the same"
    " bytes."
)


@dataclass(frozen=True)
class PageText:
    """What a report says above its figures and tables.

    Attributes:
        verdict: two or three words.
        finding: what came out.
        subject: what was compared.
        missing: sentences on systems that were asked for and could not run.
        work_note: what the local work of each row is, and which rows do the same.
        cost_note: how the times and the memory were measured, and their limits.
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
    """Return the sentences for a comparison's results."""
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
    """Return what was found of the systems, then what of everything else."""
    sections = (
        *(finding(same) for same in of_models(results.systems).values()),
        random_finding(results.random_numbers),
        optimizer_finding(results.optimizers),
        parallel_finding(results.parallelism),
        diffusion_finding(results.diffusion),
    )
    return " ".join(section for section in sections if section)


def finding(results: Sequence[SystemResult]) -> str:
    """Return what was found of the systems with one model: what is wrong, then what is right."""
    reference = results[0]
    model, unit = reference.model, loss_unit(reference.model)
    if reference.failure is not None:
        return (
            f"The reference run of {model}, {reference.system}, {reference.failure.reason},"
            " so that no curve of it could be compared."
        )
    sentences = [_trouble(result) for result in results if not result.verdict.passes]
    equal = [each.system for each in results if each.verdict is Verdict.EQUAL]
    within = [each for each in results if each.verdict is Verdict.WITHIN]
    if within:
        worst = max(within, key=lambda each: each.deviation.maximum if each.deviation else 0.0)
        assert worst.deviation is not None
        sentences.append(
            f"With {model}, {_stays(within)} within {scientific(worst.tolerance)} of the single"
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


def _trouble(result: SystemResult) -> str:
    name = f"{result.system} with {result.model}"
    if result.failure is not None:
        return f"{name} {result.failure.reason}; see {result.failure.log.name}."
    assert result.deviation is not None
    return out_of_tolerance(name, result.deviation, result.tolerance, loss_unit(result.model))


def _stays(within: Sequence[SystemResult]) -> str:
    verb = "stays" if len(within) == 1 else "stay"
    return f"{listed([each.system for each in within])} {verb}"


def _subject(comparison: Comparison, results: Sequence[SystemResult]) -> str:
    options = comparison.options
    models = [_sized(model, same) for model, same in of_models(results).items()]
    systems = dict.fromkeys(job.system for job in comparison.jobs)
    others = listed([system for system in systems if system != REFERENCE])
    which = f"{listed(models)} {'was' if len(models) == 1 else 'were'}"
    sources = listed([each.source for each in comparison.data])
    return (
        f"Unmodified, {which} trained in fp32 on {sources}"
        f" for {options.steps} steps: once on a single device, and once each under {others}, as"
        " far as they take the model. Every run of a model started from the same weights and saw"
        f" the same {options.global_batch} samples in every step, so any difference between its"
        " curves comes from how the system ran it."
    )


def _sized(model: str, results: Sequence[SystemResult]) -> str:
    summary = next((each.summary for each in results if each.summary is not None), None)
    return model if summary is None else f"{model}{size(summary.parameters)}"


def _cost_note(comparison: Comparison) -> str:
    ranks = max(job.ranks for job in comparison.jobs)
    shared = ""
    if comparison.options.share_processes:
        shared = (
            " A system trains one model after the other in the same processes: what the earlier"
            " leave in memory counts with the later."
        )
    threads = comparison.options.threads
    cores = os.cpu_count() or 1
    per_rank = "one thread" if threads == 1 else f"{threads} threads"
    sharing = f"so {ranks} ranks compute with {ranks} times the threads of the single device"
    if ranks * threads > cores:
        sharing = f"but there are only {cores} cores, so step times say little"
    return (
        f"Step time is the median wall time on the first rank, without the first {WARM_UP_STEPS}"
        " steps; whiskers span the middle half of the steps. Memory is each rank's peak resident"
        f" set, Python and torch included; the tick is the largest rank.{shared}"
        " Collectives are those that the first rank issued in step"
        f" {WARM_UP_STEPS}, and the bytes of whole tensors that they gathered, reduced, scattered"
        " or sent: an all_reduce sends about twice what a reduce_scatter of as much does, and what"
        " is sent and received counts on both sides. All ranks run on this"
        f" machine and talk over gloo; each has {per_rank}, {sharing}. Whatever else ran on the"
        " machine is in these times too."
    )
