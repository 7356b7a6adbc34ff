"""Predicts all candidates, and ranks those that fit and that the trainer accepts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from integration.errors import UsageError
from integration.recommend.candidates import Inner, candidates, inner_run, refusal
from integration.recommend.options import RecommendSetup
from integration.recommend.prediction import Prediction, predict
from integration.recommend.work import InnerWork, count_work
from integration.train.config import TrainConfig

__all__ = ["Recommendation", "recommend"]

_ADAM, _MOMENTUM = 8.0, 4.0
# Two 8-bit moments, and a scale of each for blocks; measured with llama-tiny.
_ADAM_8BIT = 2.05


@dataclass(frozen=True)
class Recommendation:
    """The result of a search.

    Attributes:
        ranked: predictions that fit and that the trainer accepts, the fastest first.
        candidates: number of ways to train that were predicted.
        too_large: how many of them do not fit.
        smallest: the prediction with the least memory; None without candidates.
        refused: sentences with which the trainer refuses others, and how many.
    """

    ranked: tuple[Prediction, ...]
    candidates: int
    too_large: int
    smallest: Prediction | None
    refused: dict[str, int]


def recommend(
    setup: RecommendSetup, log: Callable[[str, int, int], None] | None = None
) -> Recommendation:
    """Searches, and returns the fastest ``--top`` ways to train.

    Args:
        setup: the validated options.
        log: called with what is counted, its number and their total.

    Raises:
        UsageError: the model's layers cannot be counted.
    """
    torch.set_num_threads(1)
    ranks, refused = setup.options.ranks, Counter[str]()
    found = list(candidates(setup.base, ranks, setup.hardware))
    works = _count(found, refused, log)
    predictions = [
        predict(each, work, ranks, setup.hardware, _state_bytes(each, work))
        for each in found
        if (work := works.get(Inner.of(each))) is not None
    ]
    fitting = [each for each in predictions if each.memory.total <= setup.memory]
    fitting.sort(key=lambda each: (each.time.total, each.memory.total))
    return Recommendation(
        tuple(_accepted(fitting, ranks, setup.options.top, refused)),
        len(predictions), len(predictions) - len(fitting),
        min(predictions, key=lambda each: each.memory.total, default=None), dict(refused),
    )  # fmt: skip


def _count(
    found: Iterable[TrainConfig],
    refused: Counter[str],
    log: Callable[[str, int, int], None] | None,
) -> dict[Inner, InnerWork]:
    """Counts the work of each inner product that the trainer accepts."""
    examples = {Inner.of(config): config for config in found}
    works: dict[Inner, InnerWork] = {}
    for number, (inner, config) in enumerate(examples.items(), 1):
        if log is not None:
            log(f"tp {inner.tp}, cp {inner.cp}, ep {inner.ep}", number, len(examples))
        try:
            run = inner_run(config)
        except UsageError as error:
            refused[str(error)] += 1
            continue
        works[inner] = count_work(run)
    return works


def _accepted(
    ordered: Iterable[Prediction], ranks: int, top: int, refused: Counter[str]
) -> Iterable[Prediction]:
    """Yields the first predictions whose candidates the trainer accepts."""
    number = 0
    for each in ordered:
        if number == top:
            return
        error = refusal(each.config, ranks)
        if error is None:
            number += 1
            yield each
        else:
            refused[error] += 1


def _state_bytes(config: TrainConfig, work: InnerWork) -> float:
    """Returns the bytes of optimizer state of an element, on average."""
    if config.optimizer == "adam8bit":
        return _ADAM_8BIT
    if config.optimizer == "adamw":
        return _ADAM
    layers = work.layers * (work.layer.elements + work.layer.experts)  # Muon's, but for norms
    root = work.root.elements
    return (_MOMENTUM * layers + _ADAM * root) / (layers + root)
