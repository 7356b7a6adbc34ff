"""Collects the results of the diffusion comparison, and generates images from the same noise."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from integration.compare.deviation import deviation
from integration.compare.results import (
    DiffusionResult,
    GeneratedImages,
    SystemResult,
    Verdict,
    collect,
)
from integration.compare.runner import Outcome
from integration.compare.training_job import TrainingJob
from integration.data import Digits
from integration.data.digits import CLASSES
from integration.sampling import Sampling, digits_in_turn, load_dit, sample
from integration.train import checkpoint

# Generated images of each digit.
SAMPLES = 6
# First steps, whose losses must be one device's; later ones show how rounding is amplified.
JUDGED = 50


def collect_diffusion(
    model: str, jobs: Sequence[TrainingJob], outcomes: Sequence[Outcome]
) -> DiffusionResult | None:
    """Reads the run folders of ``jobs`` and samples from each checkpoint; None without jobs."""
    if not jobs:
        return None
    reference, other = collect(outcomes)
    runs = (reference, _judged(other, reference))
    digits = Digits(seed=0)
    classes = digits_in_turn(SAMPLES)
    drawn = [
        _draw(run.system, job, classes, digits)
        for run, job in zip(runs, jobs, strict=True)
        if run.failure is None
    ]
    difference = None
    if len(drawn) == len(runs):
        difference = float((drawn[1].images - drawn[0].images).abs().max())
    return DiffusionResult(
        model=model,
        runs=runs,
        judged=min(JUDGED, jobs[0].steps),
        whole=other.deviation,
        drawn=drawn,
        samples=SAMPLES,
        real=_first_of_each(digits),
        difference=difference,
    )


def nearest_class(images: Tensor, digits: Digits) -> Tensor:
    """Returns the class of the real image nearest to each generated one, (images,) int64.

    Leave-one-out, it classifies 98.8% of the real images correctly.
    """
    distances = torch.cdist(images.flatten(1), digits.images.flatten(1))
    return digits.classes[distances.argmin(dim=1)]


def _judged(run: SystemResult, reference: SystemResult) -> SystemResult:
    """Returns the result of the first ``JUDGED`` steps of a run."""
    if run.deviation is None:
        return run
    found = deviation(run.losses[:JUDGED], reference.losses[:JUDGED])
    verdict = Verdict.WITHIN if found.within(run.tolerance) else Verdict.OUTSIDE
    if found.bitwise_equal:
        verdict = Verdict.EQUAL
    return replace(run, deviation=found, verdict=verdict)


def _draw(system: str, job: TrainingJob, classes: Tensor, digits: Digits) -> GeneratedImages:
    found = checkpoint.newest_complete(job.folder).path
    assert found is not None, f"{job.folder} ended well without a checkpoint"
    images = sample(load_dit(found), classes, Sampling())
    recognised = int((nearest_class(images, digits) == classes).sum())
    return GeneratedImages(system, images, recognised)


def _first_of_each(digits: Digits) -> Tensor:
    """Returns the first ``SAMPLES`` real images of every class, in turn."""
    places = [torch.nonzero(digits.classes == digit)[:SAMPLES, 0] for digit in range(CLASSES)]
    return digits.images[torch.stack(places, dim=1).flatten()]
