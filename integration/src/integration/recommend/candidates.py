"""Enumerates the trainer's options of ways to train; its own validation refuses what it cannot do.

What bounds the search, beside the trainer's validation: tensor parallel ranks are on one host;
context parallel ranks have at least 2,048 tokens each, or are 2; a rank has at most 8 samples at a
time. Tensor parallelism includes sequence parallelism, and a loss on sharded logits where there are
logits. Buckets of fully_shard are layers, as the trainer has no option for their size; whether they
are gathered again for backward is one (``--placements zero2``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from integration.data import Modality
from integration.errors import UsageError
from integration.models import model_shape
from integration.recommend.hardware import Hardware
from integration.recommend.work import layers_of
from integration.systems import Placements
from integration.systems.divisors import divisors
from integration.train.config import TrainConfig
from integration.train.validation import ValidatedRun, validate

__all__ = ["Inner", "candidates", "inner_run", "refusal"]

_MICRO_BATCHES = (1, 2, 4, 8)
_LEAST_TOKENS = 2048
_divisors = functools.cache(divisors)


@dataclass(frozen=True)
class Inner:
    """An inner product, by whose counted work candidates are predicted.

    Attributes:
        tp: tensor parallel degree.
        cp: context parallel degree.
        ep: expert parallel degree.
        recompute: value of ``--activation-checkpointing``.
    """

    tp: int
    cp: int
    ep: int
    recompute: str

    @classmethod
    def of(cls, config: TrainConfig) -> Inner:
        """Returns the inner product of a candidate."""
        return cls(config.tp, config.cp, config.ep, config.activation_checkpointing)


def inner_run(config: TrainConfig) -> ValidatedRun:
    """Returns the validated run of a candidate's inner product, with one sample of each rank.

    Raises:
        UsageError: the trainer refuses it.
    """
    inner = replace(
        config, dp_replicate=config.ep, dp_shard=1, pp_degree=1, pp_microbatches=None,
        pp_schedule="1F1B", placements=None, offload=False, global_batch=config.ep, micro_batch=1,
        device="cpu",
    )  # fmt: skip
    return validate(inner, config.ep * config.cp * config.tp)


def refusal(config: TrainConfig, ranks: int) -> str | None:
    """Returns the error with which the trainer refuses a candidate; None if it accepts it."""
    try:
        validate(config, ranks)
    except UsageError as error:
        return str(error)
    return None


def candidates(base: TrainConfig, ranks: int, hardware: Hardware) -> Iterator[TrainConfig]:
    """Yields ways to train a model on a number of ranks, of which the trainer may refuse some.

    Args:
        base: model, sizes of a step and other options that all have.
        ranks: number of ranks.
        hardware: of the ranks.

    Raises:
        UsageError: the model is unknown, or its number of layers is.
    """
    shape = model_shape(base.model)
    has_text = shape.modality is Modality.TEXT
    experts = getattr(shape, "num_local_experts", 0)
    longest = max(2, base.sequence_length // _LEAST_TOKENS) if has_text else 1
    for pp in _divisors(ranks):
        if pp > layers_of(shape):
            continue
        for tp in _divisors(ranks // pp):
            if tp > hardware.machine.node:
                continue
            for cp in _divisors(ranks // pp // tp):
                if cp > longest:
                    continue
                data = ranks // (pp * tp * cp)
                if base.global_batch % data:
                    continue
                own = replace(
                    base, pp_degree=pp, tp=tp, cp=cp, sp=tp > 1, loss_parallel=tp > 1 and has_text
                )
                for one in _with_data(own, data, experts):
                    yield from _with_options(one, base.global_batch // data, hardware)


def _with_data(config: TrainConfig, data: int, experts: int) -> Iterator[TrainConfig]:
    """Yields the ways to use data parallel ranks: replicas, shards, and ranks of experts."""
    for replicas in _divisors(data):
        shards = data // replicas
        own = replace(config, dp_replicate=replicas, dp_shard=shards)
        of_experts = shards if shards > 1 else replicas
        degrees = [each for each in _divisors(of_experts) if experts and experts % each == 0]
        yield from (replace(own, ep=ep) for ep in degrees or [1])


def _with_options(config: TrainConfig, samples: int, hardware: Hardware) -> Iterator[TrainConfig]:
    """Yields microbatches, recomputation, placements and offloading for the samples of a rank."""
    is_pipeline = config.pp_degree > 1
    for size in _MICRO_BATCHES:
        if samples % size:
            continue
        sized = replace(config, micro_batch=size)
        if is_pipeline:
            sized = replace(config, micro_batch=samples, pp_microbatches=samples // size)
        for placements in _placements(sized):
            for offload in (
                (False, True) if hardware.accelerator and sized.dp_shard > 1 else (False,)
            ):
                placed = replace(sized, placements=placements, offload=offload)
                yield placed
                yield replace(placed, activation_checkpointing="full")


def _placements(config: TrainConfig) -> tuple[Placements | None, ...]:
    single = config.dp_shard > 1 and config.dp_replicate == 1 and config.pp_degree == 1
    return (None, "zero2") if single else (None,)
