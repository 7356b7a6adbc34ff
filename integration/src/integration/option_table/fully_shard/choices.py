"""The options of `fsdp.fully_shard` and of its modules' methods, each with its proof."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from integration.option_table import pairwise
from integration.option_table.fully_shard.apply import (
    BLOCK,
    BLOCKS,
    FACTOR,
    HOOK_SCALE,
    WIDTH,
    build,
    ranks_of,
)
from integration.option_table.fully_shard.observation import FullyShardObservation
from integration.option_table.pairwise import Choice, Completion, Pair, Run, merged, rank_choice
from testkit import Collective, fake_mesh

_MATRICES = [f"blocks.{i}.{of}.weight" for i in range(BLOCKS) for of in ("up", "down")]
_ELEMENTS = 2 * WIDTH * WIDTH  # of each
_HALF = torch.float16
_WITH_FULL_MEMORY = ("ddp", "zero1", "zero2")  # placements that keep unsharded parameters
_MAX_CHOICES = 10  # of a run, so that the cause of a failure can be found


def _method(
    name: str, value: str, evidence: str, proof: Callable[..., bool], **more: Any
) -> Choice:
    options = {name: {"True": True, "False": False, "2": 2}.get(value, value)}
    return rank_choice(f"{name}({value})", evidence, proof, **options, **more)


def _sizes(calls: tuple[Collective, ...], dtype: str) -> int:
    return sum(call.input_bytes + call.output_bytes for call in calls if call.dtype == dtype)


def _kinds(calls: tuple[Collective, ...]) -> set[str]:
    return {call.op for call in calls}


def _copies(ranks: tuple[FullyShardObservation, ...], options: Mapping[str, Any]) -> bool:
    return _parts(ranks) == (1 if options.get("placements") == "hfsdp" else 2)


def _parts(ranks: tuple[FullyShardObservation, ...]) -> float:
    """Returns how often all ranks together have the sharded parameters."""
    names = set(ranks[0].local_numel) - set(ranks[0].plain)
    sharded = ranks[0].parameters - sum(ranks[0].local_numel[name] for name in ranks[0].plain)
    return sum(rank.local_numel[name] for rank in ranks for name in names) / sharded


def _is_whole(seen: FullyShardObservation) -> bool:
    return sum(seen.local_numel.values()) == seen.parameters


def _accumulates(options: Mapping[str, Any]) -> bool:
    """Returns whether the first backward is not the last of an iteration."""
    return bool({"set_requires_gradient_sync", "set_is_last_backward"} & set(options))


def _blocks(size: int) -> Callable[..., bool]:
    """Returns the proof that each rank has a multiple of ``size`` elements of each matrix."""
    return lambda seen, options: not any(seen.local_numel[name] % size for name in _MATRICES)


def _is_native(seen: FullyShardObservation, options: Mapping[str, Any]) -> bool:
    gathers = seen.first_forward if "set_custom_all_gather" not in options else ()
    reductions = seen.backward if "set_custom_reduce_scatter" not in options else ()
    found = {call.op for call in (*gathers, *reductions) if call.dtype != "int64"}
    return bool(found) and not found & {"send", "recv"}


def _is_exchange(seen: FullyShardObservation, options: Mapping[str, Any]) -> bool:
    return "send" in _kinds((*seen.first_forward, *seen.backward))


def _factor(ranks: tuple[FullyShardObservation, ...], options: Mapping[str, Any]) -> float:
    """Returns the factor by which gradients exceed the mean over ranks."""
    found = len(ranks) / FACTOR if "set_gradient_divide_factor" in options else 1.0
    return found * HOOK_SCALE if "set_all_reduce_hook" in options else found


def gradients_are_right(
    ranks: tuple[FullyShardObservation, ...], options: Mapping[str, Any]
) -> bool:
    """Returns whether gradients are one device's, within the dtypes' precision and set factors."""
    expected = _factor(ranks, options)
    rounded = any(name in options for name in ("quantize_fn", "param_dtype"))
    rounded = rounded or options.get("parameters") == "extension"
    error = 0.1 if rounded else 0.01
    return all(
        abs(rank.grads.scale / expected - 1) < error and rank.grads.error < error for rank in ranks
    )


ARGUMENTS: tuple[Choice, ...] = (
    Choice(
        "mesh of (replicate, shard)",
        "two copies of the parameters; the gradients of all ranks' batches",
        _copies,
        {"mesh": "two axes"},
    ),
    rank_choice(
        "reshard_after_forward=True",
        "modules have the sharded parameters after forward",
        lambda seen, options: seen.sharded_after_forward,
        reshard_after_forward=True,
    ),
    rank_choice(
        "reshard_after_forward=False",
        "modules have the unsharded parameters after forward; where placements keep these, their"
        " memory stays",
        lambda seen, options: (
            (not seen.sharded_after_forward or options.get("placements") in _WITH_FULL_MEMORY)
            and seen.resident > 0
        ),
        reshard_after_forward=False,
    ),
    rank_choice(
        "reshard_after_forward=2",
        "on four ranks backward gathers over two",
        lambda seen, options: seen.sharded_after_forward and seen.post_forward_ranks == {2},
        reshard_after_forward=2,
        mesh="four ranks",
    ),
    Choice(
        'placements="ddp"',
        "each rank has all parameters; forward gathers none",
        lambda ranks, options: all(_is_whole(rank) and not rank.forward for rank in ranks),
        {"placements": "ddp"},
    ),
    *(
        rank_choice(
            f'placements="{name}"',
            "each rank updates a part of the parameters, and has the memory of all between steps;"
            " a second microbatch's forward gathers none",
            lambda seen, options: (
                not _is_whole(seen)
                and seen.resident_between > 0
                and not (_accumulates(options) and seen.forward)
            ),
            placements=name,
        )
        for name in ("zero1", "zero2")
    ),
    Choice(
        'placements="hfsdp"',
        "each rank has a quarter of the parameters",
        lambda ranks, options: _parts(ranks) == 1,
        {"placements": "hfsdp", "mesh": "two axes"},
    ),
    rank_choice(
        "shard_placement_fn: Rows(2)",
        "each rank has pairs of rows of a matrix",
        _blocks(2 * WIDTH),
        shard_placement_fn="rows",
    ),
    rank_choice(
        f"shard_placement_fn: Block({BLOCK})",
        f"no rank's part of a matrix begins or ends within {BLOCK} elements",
        lambda seen, options: all(
            seen.local_numel[name] % BLOCK == 0 or (_ELEMENTS - seen.local_numel[name]) % BLOCK == 0
            for name in _MATRICES
        ),
        shard_placement_fn="block",
    ),
    rank_choice(
        "shard_placement_fn: Whole()",
        "each rank has a matrix or nothing of it",
        _blocks(_ELEMENTS),
        shard_placement_fn="whole",
    ),
    rank_choice(
        "shard_placement_fn: Shard(0)",
        "each rank has rows of a matrix",
        _blocks(WIDTH),
        shard_placement_fn="shard",
    ),
    rank_choice(
        "quantize_fn: Tiles(2, 4)",
        "all-gathers are of bytes",
        lambda seen, options: _sizes(seen.first_forward, "uint8") > 0,
        quantize_fn="tiles",
    ),
    rank_choice(
        "mp_policy param_dtype=bfloat16",
        "Linears return bfloat16",
        lambda seen, options: seen.compute_dtype == torch.bfloat16,
        param_dtype=torch.bfloat16,
    ),
    rank_choice(
        "mp_policy param_dtype=bfloat16, cast_forward_inputs=False",
        "a block gets a float32 argument as it is",
        lambda seen, options: seen.input_dtype == torch.float32,
        param_dtype=torch.bfloat16,
        cast_forward_inputs=False,
    ),
    rank_choice(
        "mp_policy reduce_dtype=float16",
        "reduced shards are float16; float16 is sent in backward",
        lambda seen, options: (
            seen.reduce_dtypes == (_HALF,) and _sizes(seen.backward, "float16") > 0
        ),
        reduce_dtype=_HALF,
    ),
    rank_choice(
        "mp_policy output_dtype=float64",
        "the model returns float64",
        lambda seen, options: seen.output_dtype == torch.float64,
        output_dtype=torch.float64,
    ),
    rank_choice(
        "offload_policy=CPUOffloadPolicy()",
        "shards and gradients are on the host, as they are on a mesh of hosts without it; on a GPU"
        " by `packages/fsdp/tests/test_cuda.py`",
        lambda seen, options: seen.devices == ("cpu",),
        offload_policy=True,
    ),
    rank_choice(
        "ignored_params",
        "the parameter stays a plain one",
        lambda seen, options: seen.plain == ("blocks.1.gain",),
        ignored_params=True,
    ),
    rank_choice(
        'strategy="native"',
        "all-gathers and reduce-scatters, no sends",
        _is_native,
        strategy="native",
    ),
    rank_choice(
        'strategy="exchange"',
        "sends and receives",
        _is_exchange,
        strategy="exchange",
    ),
    rank_choice(
        "a parameter with fsdp_pre_all_gather",
        "all-gathers are of bytes",
        lambda seen, options: _sizes(seen.first_forward, "uint8") > 0,
        parameters="extension",
    ),
    rank_choice(
        "a parameter that is a DTensor of another axis",
        "it is sharded over both axes",
        lambda seen, options: "tp" in seen.axes and "shard" in seen.axes,
        parameters="DTensor",
    ),
)

METHODS: tuple[Choice, ...] = (
    _method(
        "set_reshard_after_backward",
        "False",
        "modules have the unsharded parameters after backward, and the next forward gathers none",
        # `set_unshard_in_backward(False)` may leave the embedding sharded, which is gathered then.
        lambda seen, options: (
            not seen.sharded_after_backward
            and len(seen.forward) <= len(seen.first_forward) // 2
            and ("set_unshard_in_backward" in options or not seen.forward)
        ),
    ),
    _method(
        "set_keep_unsharded_storage",
        "True",
        "the memory of unsharded parameters stays after backward",
        lambda seen, options: seen.resident_between > 0,
    ),
    _method(
        "set_unshard_in_backward",
        "False",
        "the embedding is not gathered for backward",
        lambda seen, options: not seen.unsharded_in_backward,
    ),
    rank_choice(
        "set_modules_to_forward_prefetch",
        "in the first block's forward the last one is unsharded, or its gather in flight",
        lambda seen, options: 3 in seen.ahead_in_forward,
        set_modules_to_forward_prefetch=True,
    ),
    rank_choice(
        "set_modules_to_backward_prefetch",
        "in the last block's backward the first one is unsharded, or its gather in flight",
        lambda seen, options: 1 in seen.ahead_in_backward,
        set_modules_to_backward_prefetch=True,
    ),
    _method(
        "set_is_last_backward",
        "False",
        "a reduction is in flight after backward, if one was issued",
        lambda seen, options: seen.waiting > 0 or "set_requires_gradient_sync" in options,
    ),
    rank_choice(
        "set_manual_backward_finalization(True)",
        "a reduction is in flight after backward, and none after `finalize_backward`",
        lambda seen, options: seen.waiting_at_end > 0,
        set_manual_backward_finalization=True,
    ),
    _method(
        "set_requires_gradient_sync",
        "False",
        "no gradients after the first of two microbatches, and its backward sends less; with"
        " placements that shard gradients all are reduced, and the next forward gathers none",
        lambda seen, options: (
            not seen.forward
            if options.get("placements") == "zero2"
            else seen.first_grads == _ignored(options)
            and _bytes(seen.first_backward) < _bytes(seen.backward)
        ),
    ),
    _method(
        "set_requires_all_reduce",
        "False",
        "no gradients after the first of two microbatches; its backward sends less",
        lambda seen, options: (
            seen.first_grads == _ignored(options)
            and _bytes(seen.first_backward) < _bytes(seen.backward)
        ),
        mesh="two axes",
    ),
    Choice(
        f"set_gradient_divide_factor({FACTOR})",
        "gradients are the sum of all ranks', divided by it",
        gradients_are_right,
        {"set_gradient_divide_factor": True},
    ),
    rank_choice(
        "set_force_sum_reduction_for_comms(True)",
        "reductions are sums",
        lambda seen, options: not any(one.average for one in seen.reductions),
        set_force_sum_reduction_for_comms=True,
    ),
    _method(
        "set_reduce_scatter_unused_params",
        "True",
        "an unused parameter has a gradient",
        lambda seen, options: seen.unused_grad,
    ),
    _method(
        "set_reduce_scatter_max_input_buffers",
        "2",
        "two reductions are in flight at once",
        lambda seen, options: seen.in_flight == 2,
    ),
    Choice(
        "set_all_reduce_hook",
        f"gradients are {HOOK_SCALE:g} times as large, as the hook makes them",
        gradients_are_right,
        {"set_all_reduce_hook": True},
    ),
    rank_choice(
        "set_custom_all_gather",
        "it is called",
        lambda seen, options: seen.custom_gathers > 0,
        set_custom_all_gather=True,
    ),
    rank_choice(
        "set_custom_reduce_scatter",
        "it is called",
        lambda seen, options: seen.custom_reductions > 0,
        set_custom_reduce_scatter=True,
    ),
    rank_choice(
        "set_allocate_memory_from_process_group_for_comm(True)",
        "buffers are allocated from the process group",
        lambda seen, options: seen.allocations > 0,
        set_allocate_memory_from_process_group_for_comm=True,
    ),
    _method(
        "set_separate_reduce_scatter_group",
        "True",
        "reductions are in another process group than the mesh's",
        lambda seen, options: (
            bool(seen.reductions) and seen.mesh_group not in {one.group for one in seen.reductions}
        ),
    ),
)

CHOICES: Run = (*ARGUMENTS, *METHODS)


def _bytes(calls: tuple[Collective, ...]) -> int:
    return sum(call.input_bytes for call in calls)


def _ignored(options: Mapping[str, Any]) -> int:
    """Returns the number of parameters whose gradients are not reduced."""
    return 1 if "ignored_params" in options else 0


def run_options(choices: Run) -> dict[str, Any]:
    """Returns all options of a run of ``choices``, the number of ranks included."""
    return pairwise.run_options(choices, ranks_of)


@functools.cache  # pairs and larger runs are asked for again and again
def completed(choices: Run) -> Completion:
    """Calls `fully_shard` and the methods with ``choices`` on a mesh without processes."""
    options = run_options(choices)
    with fake_mesh((options["ranks"],)):
        try:
            build(options, blocks=1)
        except ValueError as error:
            return Completion((), str(error))
    return Completion(choices, None)


@functools.cache
def pairs() -> tuple[Pair, ...]:
    """Returns every compatible pair of choices, with its refusal if any."""
    return pairwise.pairs(CHOICES, completed)


@functools.cache
def covering_runs() -> tuple[Run, ...]:
    """Returns runs in which each accepted pair of choices occurs, and so each choice."""
    return pairwise.covering_runs(CHOICES, completed, _can_be_observed)


def _can_be_observed(run: Run) -> bool:
    """Returns whether a run is small, and leaves a strategy at least one collective to issue."""
    options = merged(run) or {}
    if len(run) > _MAX_CHOICES:
        return False
    custom = {"set_custom_all_gather", "set_custom_reduce_scatter"}
    return "strategy" not in options or not custom <= set(options)
