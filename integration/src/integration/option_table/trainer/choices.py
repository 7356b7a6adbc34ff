"""The trainer's options that change how a step is executed, each with its proof."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import integration.data
from integration.errors import UsageError
from integration.option_table import pairwise
from integration.option_table.pairwise import Choice, Completion, Pair, Run, merged
from integration.option_table.trainer.observation import STEPS, TrainingObservation
from integration.train.config import DIST_RNG_RANDOM, NATIVE_RANDOM, TrainConfig
from integration.train.validation import validate

_SEQUENCE, _VOCABULARY = 64, 256
_TOKENS = 300  # of a tokenizer that is trained
_CLIP = 1e-2

# Options of every run: a small model, and no files that other options request.
BASE: Mapping[str, Any] = {
    "model": "llama-tiny",
    "steps": STEPS,
    "count_collectives": 2,
    "micro_batch": 2,
    "global_batch": 8,
    "peak_flops": 1e12,
    "resume": "never",
    "tensorboard": False,
    "final_checkpoint": False,
}


def _each(proof: Callable[[TrainingObservation], bool]) -> Callable[..., bool]:
    """Returns the proof that ``proof`` passes on every rank."""
    return lambda ranks, options: all(proof(rank) for rank in ranks)


def _has(seen: TrainingObservation, *kinds: str) -> bool:
    return all(seen.collectives.get(kind, 0) > 0 for kind in kinds)


def _is_sharded(seen: TrainingObservation) -> bool:
    # Norms and what does not divide evenly are a few percent of the tiny models.
    return seen.local_numel < 0.7 * seen.parameters


def _fully_sharded(seen: TrainingObservation) -> bool:
    return _is_sharded(seen) and _has(seen, "all_gather", "reduce_scatter")


def _sends_gradients(seen: TrainingObservation) -> bool:
    # HSDP of fsdp reduces by sends on gloo.
    return seen.collectives.get("all_reduce", 0) >= 4 * seen.local_numel or _has(seen, "send")


def _replicated(ranks: tuple[TrainingObservation, ...], options: Mapping[str, Any]) -> bool:
    copies = sum(rank.local_numel for rank in ranks) / ranks[0].parameters
    return copies >= 2 and all(map(_sends_gradients, ranks))


def _head(seen: TrainingObservation) -> tuple[int, int]:
    """Returns the tokens and the columns of the vocabulary of the output layer on this rank."""
    assert seen.head_shape is not None
    return seen.head_shape[1], seen.head_shape[2]


def _exchanges(seen: TrainingObservation, chunks: int) -> int:
    """Returns the all-to-alls of tokens of a step that recomputes none: one exchanges numbers."""
    return (1 + 4 * chunks) * seen.expert_calls


def _keeps_dispatched(ranks: tuple[TrainingObservation, ...], options: Mapping[str, Any]) -> bool:
    expected = [_exchanges(rank, options.get("ep_chunks", 1)) for rank in ranks]
    found = [rank.token_exchanges for rank in ranks]
    return _recomputes(1)(ranks, options) and found == expected and all(found)


def _plan(
    name: str, evidence: str, proof: Callable[[TrainingObservation], bool], **options: Any
) -> Choice:
    return Choice(f"--system plan {name}", evidence, _each(proof), {"system": "plan", **options})


PARALLELISM: tuple[Choice, ...] = (
    Choice(
        "--system ddp",
        "two copies of the parameters; gradients are reduced",
        _replicated,
        {"system": "ddp"},
    ),
    *(
        Choice(
            f"--system {name}",
            "half of the parameters; all-gathers and reduce-scatters",
            _each(_fully_sharded),
            {"system": name},
        )
        for name in ("fsdp1", "fsdp2")
    ),
    Choice(
        "--system fsdp",
        "half of the parameters; sends of the others, fsdp's strategy for gloo",
        _each(lambda seen: _is_sharded(seen) and _has(seen, "send")),
        {"system": "fsdp"},
    ),
    Choice(
        "--system dtensor-tp",
        "half of the parameters",
        _each(_is_sharded),
        {"system": "dtensor-tp"},
    ),
    Choice(
        "--system torchtitan-style --dp-shard 2",
        "half of the parameters; all-gathers and reduce-scatters",
        _each(_fully_sharded),
        {"system": "torchtitan-style", "dp_shard": 2},
    ),
    Choice(
        "--system torchtitan-style --tp 2 --sp",
        "half of the parameters; all-gathers and reduce-scatters of activations",
        _each(_fully_sharded),
        {"system": "torchtitan-style", "tp": 2, "sp": True},
    ),
    Choice(
        "--system plan --dp-replicate 2",
        "two copies of the parameters; gradients are reduced",
        _replicated,
        {"system": "plan", "dp_replicate": 2},
    ),
    _plan(
        "--dp-shard 2",
        "half of the parameters, by `fully_shard`",
        lambda seen: seen.is_fsdp and _is_sharded(seen),
        dp_shard=2,
        zero3=False,
    ),
    _plan(
        "--dp-shard 2 --zero3",
        "half of the parameters without `fully_shard`; all-gathers and reduce-scatters",
        lambda seen: not seen.is_fsdp and _fully_sharded(seen),
        dp_shard=2,
        zero3=True,
    ),
    _plan("--tp 2", "half of the parameters", _is_sharded, tp=2),
    _plan(
        "--tp 2 --sp",
        "half of the parameters; all-gathers and reduce-scatters of activations",
        _fully_sharded,
        tp=2,
        sp=True,
    ),
    _plan(
        "--tp 2 --sp --overlap tp",
        "transfers beside the products of linear layers",
        lambda seen: seen.overlapped > 0,
        tp=2,
        sp=True,
        overlap="tp",
    ),
    _plan(
        "--tp 2 --loss-parallel",
        "the output layer leaves half of the vocabulary's logits on each rank",
        lambda seen: _head(seen)[1] in (_VOCABULARY // 2, _TOKENS // 2),
        tp=2,
        loss_parallel=True,
    ),
    *(
        _plan(
            f"--cp 2 --cp-method {method}",
            "the output layer gets half of each sequence",
            lambda seen: _head(seen)[0] == _SEQUENCE // 2,
            cp=2,
            cp_method=method,
        )
        for method in ("ring", "all-gather", "ulysses")
    ),
    # Degrees beside it would need eight ranks.
    _plan(
        "--cp 4 --cp-method ulysses-ring:2",
        "the output layer gets a quarter of each sequence; all-to-alls of heads, and sends",
        lambda seen: _head(seen)[0] == _SEQUENCE // 4 and _has(seen, "all_to_all", "send"),
        cp=4,
        cp_method="ulysses-ring:2",
        **dict.fromkeys(("dp_replicate", "dp_shard", "ep", "tp"), 1),
    ),
    _plan(
        "--static",
        "modules compute on plain tensors",
        lambda seen: not seen.head_is_dtensor,
        static=True,
    ),
    _plan(
        "--no-static",
        "modules compute on DTensors",
        lambda seen: seen.head_is_dtensor,
        static=False,
    ),
    _plan(
        "--dp-shard 2 --ep 2",
        "all-to-alls of tokens; half of the parameters",
        lambda seen: _is_sharded(seen) and _has(seen, "all_to_all"),
        dp_shard=2,
        ep=2,
        model="mixtral-tiny",
    ),
    _plan(
        "--dp-shard 2 --ep 2 --ep-chunks 2",
        "twice as many all-to-alls of tokens",
        lambda seen: seen.token_exchanges >= _exchanges(seen, 2) > 0,
        dp_shard=2,
        ep=2,
        ep_chunks=2,
        model="mixtral-tiny",
    ),
    *(
        Choice(
            f"--pp-degree 2 --pp-schedule {schedule}",
            "a stage's parameters; sends",
            _each(lambda seen: _is_sharded(seen) and _has(seen, "send")),
            {"system": "single", "pp_degree": 2, "pp_schedule": schedule},
        )
        for schedule in ("GPipe", "1F1B")
    ),
)


def _computes_in(dtype: torch.dtype) -> Callable[..., bool]:
    """Returns the proof of mixed precision in ``dtype``, which scales the loss of float16."""

    def proof(ranks: tuple[TrainingObservation, ...], options: Mapping[str, Any]) -> bool:
        found = {rank.head_dtype for rank in ranks} - {None}
        scaled = {record.loss_scale is not None for record in ranks[0].records}
        # Master weights, and so the moments of plain AdamW, stay in fp32.
        moments = set(ranks[0].state_dtypes)
        in_fp32 = "optimizer" in options or moments == {torch.float32}
        return found == {dtype} and scaled == {dtype == torch.float16} and in_fp32

    return proof


def _sends(dtype: str) -> Callable[..., bool]:
    """Returns the proof that gradients are sent in a dtype, by an all-to-all of each bucket."""
    return _each(lambda seen: ("all_to_all", dtype) in seen.sent)


def _recomputes(share: float) -> Callable[..., bool]:
    """Returns the proof that a share of the activation functions is recomputed, on all ranks."""

    def proof(ranks: tuple[TrainingObservation, ...], options: Mapping[str, Any]) -> bool:
        once = sum(rank.recomputation[0] for rank in ranks)
        again = sum(rank.recomputation[1] for rank in ranks)
        return again == share * once > 0

    return proof


def _clips(ranks: tuple[TrainingObservation, ...], options: Mapping[str, Any]) -> bool:
    before = [record.gradient_norm for record in ranks[0].records]
    return all(norm is not None and norm > _CLIP for norm in before) and all(
        rank.clipped_norm <= _CLIP * (1 + 1e-3) for rank in ranks
    )


def _accumulates(ranks: tuple[TrainingObservation, ...], options: Mapping[str, Any]) -> bool:
    summary = ranks[0].summary
    assert summary is not None
    microbatches = options["global_batch"] // (
        options["micro_batch"] * summary.data_parallel_degree
    )
    samples = options["micro_batch"] if "pp_degree" in options else 1  # a pipeline splits them
    return bool(max(rank.head_calls for rank in ranks) == microbatches * samples)


def _saves(*steps: int) -> Callable[..., bool]:
    folders = {f"checkpoints/step-{step:08d}" for step in steps}
    return lambda ranks, options: folders <= set(ranks[0].files)


def _fingerprints(ranks: tuple[TrainingObservation, ...], options: Mapping[str, Any]) -> bool:
    summary = ranks[0].summary
    assert summary is not None
    return summary.initial_weights == ranks[0].weights is not None and (
        summary.first_masks is not None or "dropout" not in options
    )


def _has_tokens(ranks: tuple[TrainingObservation, ...], options: Mapping[str, Any]) -> bool:
    columns = {_head(rank)[1] for rank in ranks if rank.head_shape is not None}
    is_there = {"tokenizer.json", "data"} <= set(ranks[0].files)
    return is_there and columns <= {_TOKENS, _TOKENS // 2} and bool(columns)


def _evaluates(ranks: tuple[TrainingObservation, ...], options: Mapping[str, Any]) -> bool:
    found = [record.eval_loss is not None for record in ranks[0].records]
    return found == [False] * (STEPS - 1) + [True]


def _drops_out(seen: TrainingObservation) -> bool:
    if seen.graphs:  # in compiled layers only operators are observable
        return any(name in seen.operators for name in ("aten::bernoulli_", "aten::native_dropout"))
    return 0.05 < seen.dropped < 0.15


POLICIES: tuple[Choice, ...] = (
    Choice(
        "--dtype bf16",
        "the output layer computes in bfloat16; AdamW's moments are float32",
        _computes_in(torch.bfloat16),
        {"dtype": "bf16"},
    ),
    Choice(
        "--dtype fp16",
        "the output layer computes in float16, with a loss scale; AdamW's moments are float32",
        _computes_in(torch.float16),
        {"dtype": "fp16"},
    ),
    Choice(
        "--precision float8-rowwise",
        "matrix products have operands in float8",
        _each(lambda seen: seen.quantized > 0 or "aten::_scaled_mm" in seen.operators),
        {"precision": "float8-rowwise"},
    ),
    *(
        Choice(
            f"--send-dtype {name}",
            f"all-to-alls of {evidence}",
            _sends(dtype),
            {"send_dtype": name},
        )
        for name, evidence, dtype in (
            ("bfloat16", "bfloat16", "bfloat16"),
            ("float8", "bytes", "uint8"),
        )
    ),
    Choice(
        "--activation-checkpointing full",
        "every activation function is computed twice",
        _recomputes(1),
        {"activation_checkpointing": "full"},
    ),
    Choice(
        "--activation-checkpointing selective-op",
        "every activation function is computed twice",
        _recomputes(1),
        {"activation_checkpointing": "selective-op"},
    ),
    Choice(
        "--activation-checkpointing selective-layer",
        "every activation function of every second layer is computed twice",
        _recomputes(0.5),
        {"activation_checkpointing": "selective-layer"},
    ),
    Choice(
        "--activation-checkpointing keep-dispatch",
        "every activation function is computed twice, and tokens are sent once",
        _keeps_dispatched,
        {"activation_checkpointing": "keep-dispatch"},
    ),
    Choice(
        "--compile aot_eager",
        "graphs are made, without graph breaks",
        _each(lambda seen: seen.graphs > 0 and seen.graph_breaks == 0),
        {"compile": "aot_eager"},
    ),
    Choice(
        "--optimizer adam8bit",
        "moments of one byte",
        _each(lambda seen: seen.optimizer == "Adam8bit" and torch.uint8 in seen.state_dtypes),
        {"optimizer": "adam8bit"},
    ),
    Choice(
        "--optimizer muon",
        "the optimizer is Muon",
        _each(lambda seen: seen.optimizer == "Muon"),
        {"optimizer": "muon"},
    ),
    Choice(
        "--optimizer soap",
        "the optimizer is SOAP",
        _each(lambda seen: seen.optimizer == "SOAP"),
        {"optimizer": "soap"},
    ),
    Choice(
        f"--clip-grad-norm {_CLIP}",
        "gradients have this norm in the optimizer's step, and had a larger one before",
        _clips,
        {"clip_grad_norm": _CLIP},
    ),
    Choice(
        "--global-batch 16 --micro-batch 2",
        "the output layer is called once for each microbatch",
        _accumulates,
        {"global_batch": 16, "micro_batch": 2},
    ),
    Choice(
        "--init sharded",
        "the system parallelizes a model without weights",
        _each(lambda seen: seen.built_on != ("cpu",)),
        {"init": "sharded"},
    ),
    Choice(
        "--dropout 0.1 --random dist-rng",
        "a tenth of the attention's weights are zero",
        _each(_drops_out),
        {"dropout": 0.1, "random": DIST_RNG_RANDOM},
    ),
    Choice(
        "--dropout 0.1",
        "a tenth of the attention's weights are zero",
        _each(_drops_out),
        {"dropout": 0.1, "random": NATIVE_RANDOM},
    ),
    Choice(
        "--final-checkpoint",
        "a checkpoint of the last step",
        _saves(STEPS),
        {"final_checkpoint": True},
    ),
    Choice(
        "--checkpoint-every 1",
        "a checkpoint of each step",
        _saves(*range(1, STEPS + 1)),
        {"checkpoint_every": 1},
    ),
    Choice(
        "--checkpoint-every 1 --checkpoint-async",
        "a checkpoint of each step, written in the background",
        lambda ranks, options: (
            _saves(*range(1, STEPS + 1))(ranks, options)
            and all(rank.background_saves == STEPS for rank in ranks)
        ),
        {"checkpoint_every": 1, "checkpoint_async": True},
    ),
    Choice(
        "--warmup-steps 2",
        "the learning rate grows over two steps",
        lambda ranks, options: (
            [record.learning_rate for record in ranks[0].records[:2]] == [5e-4, 1e-3]
        ),
        {"warmup_steps": 2},
    ),
    Choice(
        "--schedule cosine --min-learning-rate 1e-4",
        "the learning rate of the last step is this one, which no other schedule has",
        lambda ranks, options: round(ranks[0].records[-1].learning_rate or 0, 9) == 1e-4,
        {"schedule": "cosine", "min_learning_rate": 1e-4},
    ),
    Choice(
        "--attn-mask-type block-causal",
        "the decoder gets the positions of tokens in their documents, or attention a mask of them",
        _each(lambda seen: seen.knows_documents),
        {"attn_mask_type": "block-causal"},
    ),
    Choice(
        f"--tokenizer bpe:{_TOKENS}",
        "logits of as many tokens; the tokenizer and the tokens are in the run folder",
        _has_tokens,
        {"tokenizer": f"bpe:{_TOKENS}", "data": Path(integration.data.__file__).parent},
    ),
    Choice(
        f"--eval-samples 16 --eval-every {STEPS}",
        "the last step has a loss of held-out samples",
        _evaluates,
        {"eval_samples": 16, "eval_every": STEPS},
    ),
    Choice(
        "--fingerprint",
        "the summary has a hash of the initial weights, and of masks where there is dropout",
        _fingerprints,
        {"fingerprint": True},
    ),
    Choice(
        "--profile-steps 3:3",
        "a trace of the third step, with its operators",
        lambda ranks, options: (
            "profile/rank0.pt.trace.json" in ranks[0].files and bool(ranks[0].operators)
        ),
        {"profile_steps": "3:3"},
    ),
)

CHOICES: tuple[Choice, ...] = (*PARALLELISM, *POLICIES)


def ranks_of(options: Mapping[str, Any]) -> int:
    """Returns the ranks on which ``options`` run: the product of the degrees, and at least two."""
    degrees: list[int] = [options.get(name, 1) for name in ("dp_replicate", "dp_shard", "cp", "tp")]
    return max(2, math.prod(degrees))


# Ranks of a run: a pair needs at most two axes of two ranks.
MOST_RANKS = 4


def run_options(choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns all options of a run of ``choices``, the number of ranks included."""
    options = {**BASE, **(merged(choices) or {})}
    return options | {"ranks": ranks_of(options)}


@functools.cache
def completed(choices: Run) -> Completion:
    """Adds to ``choices`` the first kind of parallelism with which they are accepted."""
    refusals = []
    for more in [(), *((kind,) for kind in PARALLELISM if kind not in choices)]:
        run = tuple(choice for choice in CHOICES if choice in (*choices, *more))
        options = merged(run)
        if options is None or "system" not in options:
            continue
        try:
            config = TrainConfig(**run_options(run))
            validate(config)
        except UsageError as error:
            refusals.append(str(error))
        else:
            return Completion(run, None)
    words = {word for choice in choices for word in choice.name.split() if word.startswith("--")}
    named = (text for text in refusals if any(word in text for word in words - {"--system"}))
    return Completion((), next(named, refusals[0]))


@functools.cache
def pairs() -> tuple[Pair, ...]:
    """Returns every compatible pair of choices, with its refusal if any."""
    return pairwise.pairs(CHOICES, completed)


@functools.cache
def covering_runs() -> tuple[Run, ...]:
    """Returns runs in which each accepted pair of choices occurs, and so each choice."""
    return pairwise.covering_runs(
        CHOICES, completed, lambda run: ranks_of(run_options(run)) <= MOST_RANKS
    )
