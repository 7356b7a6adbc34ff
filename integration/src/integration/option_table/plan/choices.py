"""The options of `Plan` and of `parallelize`, each with its proof."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from integration.option_table import pairwise
from integration.option_table.pairwise import Choice, Completion, Pair, Run, merged, rank_choice
from integration.option_table.plan.apply import axes_of, build, mesh_of, ranks_of
from integration.option_table.plan.model import BATCH, TOKENS, WIDTH
from integration.option_table.plan.observation import PlanObservation
from plan_api import Float8Rowwise, uninstall
from testkit import Collective, fake_mesh

_MOST_RANKS = 4
_MAX_CHOICES = 16  # of a run, so that the cause of a failure can be found
_SMALL = 0.0005  # megabytes of gradients, of which the model has more
_MATRIX = 2 * WIDTH * WIDTH  # elements of each of the MLP's two
_BIAS = 2 * WIDTH  # elements of its bias


def is_right(ranks: tuple[PlanObservation, ...], options: Mapping[str, Any]) -> bool:
    """Returns whether gradients and weights after three steps are one device's."""
    return all(rank.error < _tolerance(options) for rank in ranks)


def _tolerance(options: Mapping[str, Any]) -> float:
    narrow = {"mp_policy", "quantize", "send_dtype", "precision"}  # bfloat16, 8 bits
    return 5e-2 if narrow & options.keys() else 1e-5


def _count(calls: tuple[Collective, ...], *kinds: str) -> int:
    return sum(call.op in kinds for call in calls)


def _dispatches(calls: tuple[Collective, ...]) -> int:
    """Counts all-to-alls of tokens; those of bytes are of gradients (``send_dtype=``)."""
    return sum(call.op == "all_to_all" and call.dtype != "uint8" for call in calls)


def _reductions(seen: PlanObservation) -> int:
    return _count(seen.backward, "all_reduce", "reduce_scatter")


def _of_matrix(seen: PlanObservation, options: Mapping[str, Any]) -> int:
    """Returns the elements of the MLP's matrix on a rank if only tensor parallelism shards it."""
    return _MATRIX // 2 if options.get("tp") == "weights" else _MATRIX


def _calls(options: Mapping[str, Any]) -> int:
    """Returns the number of the MLP's forwards in a step without a guard."""
    return 2 if "recompute" in options else 1


def _after_forward(seen: PlanObservation, options: Mapping[str, Any]) -> float:
    """Returns the share of the MLP's elements that a rank has after forward."""
    size = 2 * _MATRIX + _BIAS
    return seen.gathered / (size // 2 if options.get("tp") == "weights" else size)


def _quantizes(seen: PlanObservation, options: Mapping[str, Any]) -> bool:
    if "replicate" in options and "flat" not in options:  # each rank has all of its own
        return seen.error > 1e-5
    return any(call.dtype == "uint8" for call in seen.forward)


def _halved(seen: PlanObservation, options: Mapping[str, Any]) -> bool:
    """Returns whether data parallelism leaves this rank half of the MLP's matrix."""
    return seen.local_numel["mlp.up.weight"] * 2 == _of_matrix(seen, options)


def _whole_in_backward(seen: PlanObservation) -> bool:
    # In static mode the parameter has its gradient behind backward only.
    return seen.last_grad == seen.sizes["last.weight"]


def _whole_at_rest(seen: PlanObservation, options: Mapping[str, Any]) -> bool:
    return seen.local_numel["last.weight"] == seen.sizes["last.weight"]


def _share(seen: PlanObservation) -> float:
    """Returns this rank's share of the elements of all parameters but the experts'."""
    names = [name for name in seen.sizes if "experts" not in name]
    return sum(seen.local_numel[name] for name in names) / sum(seen.sizes[name] for name in names)


def _are_named(seen: PlanObservation, options: Mapping[str, Any]) -> bool:
    """Returns whether exactly those packages are used that ``use=`` names."""
    rules = (seen.rules > 0) == bool(options.get("dtensor-rules"))
    if "dp" not in options or "fully_shard" in options or "fused-comm" in options:
        return rules
    return rules and _reductions(seen) > len(seen.local_numel) // 2


_WEIGHTS = {"tp": "weights"}

PARALLELIZE: tuple[Choice, ...] = (
    rank_choice(
        'mode="eager"',
        "modules compute on DTensors",
        lambda seen, options: not seen.is_plain and not seen.mlp_is_plain,
        mode="eager",
    ),
    rank_choice(
        'mode="static", guard_steps=2',
        "modules compute on plain tensors; the first two steps compute the MLP in Eager, too",
        lambda seen, options: (
            seen.is_plain and min(seen.calls[:2]) > _calls(options) == seen.calls[2]
        ),
        mode="static",
        guard_steps=2,
    ),
    rank_choice(
        'use=("fused-comm",)',
        "fewer reductions than parameters; no other package is used",
        lambda seen, options: (
            _reductions(seen) < len(seen.local_numel) and _are_named(seen, options)
        ),
        **{"fused-comm": True},
    ),
    rank_choice(
        f"bucket_mb={_SMALL}",
        "several reductions, fewer than parameters",
        lambda seen, options: 1 < _reductions(seen) < len(seen.local_numel),
        bucket_mb=_SMALL,
    ),
    rank_choice(
        'use=("dist-rng",)',
        "dropout draws what it draws on one device; no other package is used",
        lambda seen, options: 0.1 < seen.dropped < 0.9 and _are_named(seen, options),
        **{"dist-rng": True, "dropout": 0.5},
    ),
    rank_choice(
        'use=("dtensor-rules",)',
        "it runs the operators of DTensors; no other package is used",
        lambda seen, options: seen.rules > 0 and _are_named(seen, options),
        **{"dtensor-rules": True},
    ),
    rank_choice(
        "strict=True",
        "a plan that overrides itself is refused",
        lambda seen, options: "overrides itself" in seen.refused["strict"],
        strict=True,
    ),
    rank_choice(
        "src_data_rank=1",
        "weights are those that rank 1 has drawn",
        lambda seen, options: seen.error < _tolerance(options),
        src_data_rank=1,
    ),
    rank_choice(
        "src_data_rank=None",
        "`parallelize` sends no weights",
        lambda seen, options: not _count(seen.setup, "scatter", "broadcast"),
        src_data_rank=None,
    ),
    rank_choice(
        "a model of deferred_init",
        "it has no memory before, and one device's weights after",
        lambda seen, options: not seen.weights_before,
        deferred=True,
    ),
    rank_choice(
        'overlap="tp"',
        "sends and receives in forward and backward, beside the products of the MLP",
        lambda seen, options: (
            _count(seen.forward, "send") > 0 and _count(seen.backward, "send") > 0
        ),
        overlap="tp",
        **_WEIGHTS,
    ),
)

_BATCH = {"dp": True}
_FULLY = {**_BATCH, "fully_shard": True}

PLAN: tuple[Choice, ...] = (
    rank_choice(
        "Plan(cover=True)", "a plan without an entry for a parameter is refused",
        lambda seen, options: "cover" in seen.refused["cover"],
        cover=True,
    ),
    rank_choice(
        'shard("<in>", Shard(0))', "the first Linear gets half of the batch",
        lambda seen, options: (
            seen.input_shape[0] * (4 if options.get("tp") == "batch" else 2) == BATCH
        ),
        **_BATCH,
    ),
    rank_choice(
        'redistribute("<out>", Shard(0), Replicate())',
        "the model returns twice the rows that the first Linear gets",
        lambda seen, options: seen.output_shape[0] == 2 * seen.input_shape[0],
        **_BATCH, out=True,
    ),
    rank_choice(
        "phase=OPTIM", "the optimizer has half; forward gathers, backward does not",
        lambda seen, options: (
            _halved(seen, options) and _count(seen.forward, "all_gather") > 0
            and ("tp" in options or not _count(seen.backward, "all_gather"))
            and (_whole_in_backward(seen) or options.get("mode") == "static")
        ),
        **_BATCH, phase="ZeRO-1",
    ),
    rank_choice(
        f"phase=OPTIM and GRAD, bucket_mb={_SMALL}", "half of a gradient is kept during backward",
        lambda seen, options: _halved(seen, options) and not _whole_in_backward(seen),
        **_BATCH, phase="ZeRO-2", bucket_mb=_SMALL,
    ),
    rank_choice(
        "phase=RUN", "half of a matrix between steps; forward and backward gather it",
        lambda seen, options: (
            _halved(seen, options) and _count(seen.forward, "all_gather") > 0
            and _count(seen.backward, "all_gather") > 0
        ),
        **_BATCH, phase="ZeRO-3",
    ),
    rank_choice(
        'shard("up.weight", Shard(0), unit=4)',
        "half of a matrix; a size that is not made of units is refused",
        lambda seen, options: (
            seen.local_numel["mlp.up.bias"] <= WIDTH and "unit" in seen.refused["unit"]
        ),
        **_WEIGHTS, unit=4,
    ),
    rank_choice(
        'redistribute("mlp.<out>", Partial(), Shard(1))',
        "the MLP returns half of the sequence, by a reduce-scatter, or sends with `overlap`",
        lambda seen, options: (
            seen.mlp_shape[1] == TOKENS // 2
            and _count(seen.forward, "send" if "overlap" in options else "reduce_scatter") > 0
        ),
        **_WEIGHTS, between="sequence",
    ),
    rank_choice(
        "redistribute(grad_src=Partial(), grad_dst=Partial())",
        "gradients before the MLP differ between ranks until they are reduced",
        lambda seen, options: not seen.same_grad,
        **_WEIGHTS, grad_dst=True,
    ),
    rank_choice(
        "local", "experts loop over plain tensors",
        lambda seen, options: seen.experts_plain and seen.experts == 4,
        **_WEIGHTS, experts="local",
    ),
    rank_choice(
        "index(count=)", "a rank loops over half of the experts",
        lambda seen, options: seen.experts_plain and seen.experts == 2,
        **_WEIGHTS, experts="index",
    ),
    rank_choice(
        "dispatch", "a rank loops over half of the experts; all-to-alls of tokens",
        lambda seen, options: seen.experts == 2 and _count(seen.forward, "all_to_all") > 0,
        **_BATCH, experts="dispatch",
    ),
    rank_choice(
        "dispatch(chunks=2)", "twice as many all-to-alls of tokens",
        lambda seen, options: seen.experts == 2 and _count(seen.forward, "all_to_all") > 4,
        **_BATCH, experts="dispatch", chunks=2,
    ),
    rank_choice(
        "factory", "what forward makes is cut in halves",
        lambda seen, options: seen.factory_shape == (WIDTH // 2,),
        **_WEIGHTS, factory=True,
    ),
    rank_choice(
        'context(method="ring", order="zigzag")', "attention takes half of the sequence; sends",
        lambda seen, options: (
            seen.attention_shape[1] == TOKENS // 2 and _count(seen.forward, "send") > 0
        ),
        tp="sequence", context="ring", order="zigzag", dropout=0.0,
    ),
    rank_choice(
        'recompute("mlp")', "the MLP computes in forward and in backward",
        lambda seen, options: seen.calls[2] == _calls(options),
        recompute="full",
    ),
    rank_choice(
        'recompute("routed", "keep-dispatch")',
        "the router computes in forward and in backward, which has fewer all-to-alls",
        lambda seen, options: (
            seen.router_calls == 2
            and _dispatches(seen.forward) > _dispatches(seen.backward) > 0
        ),
        **_BATCH, experts="dispatch", recompute_routed="keep-dispatch",
    ),
    rank_choice(
        'precision("mlp.(up|down)", Float8Rowwise())',
        "the MLP multiplies float8 operands",
        lambda seen, options: seen.quantized >= 2,
        precision=Float8Rowwise("reference"),
    ),
    rank_choice(
        'compile("attention", "aot_eager")', "attention is one graph of torch.compile",
        lambda seen, options: seen.graphs > 0,
        compile="aot_eager",
    ),
    rank_choice(
        "eager", "in static mode, the MLP computes on DTensors",
        lambda seen, options: seen.is_plain and not seen.mlp_is_plain,
        mode="static", eager=True,
    ),
    rank_choice(
        "fully_shard(reshard_after_forward=False)",
        "about half of the parameters between steps; a module has all of its own after forward",
        lambda seen, options: (
            _after_forward(seen, options) == 1
            and (_share(seen) < 0.75 or "replicate" in options)
        ),
        **_FULLY, reshard_after_forward=False,
    ),
    rank_choice(
        "fully_shard(flat=True, reshard_after_forward=2)",
        "about a quarter of the parameters between steps; backward gathers over two ranks",
        lambda seen, options: (
            seen.gathered_over == {2} and _share(seen) < (0.6 if "replicate" in options else 0.4)
        ),
        **_FULLY, tp="batch", flat=True, reshard_after_forward=2,
    ),
    rank_choice(
        "fully_shard(quantize=Tiles(rows=4, cols=4))", "matrices are gathered as bytes",
        _quantizes,
        **_FULLY, quantize=True,
    ),
    rank_choice(
        "fully_shard(replicate=2)", "each rank has a copy, or with `flat=True` half of one",
        lambda seen, options: (
            0.4 < _share(seen) < 0.6 if "flat" in options else _whole_at_rest(seen, options)
        ),
        **_FULLY, replicate=2,
    ),
    rank_choice(
        "fully_shard(mp_policy=MixedPrecisionPolicy(torch.bfloat16))",
        "the MLP computes in bfloat16",
        lambda seen, options: seen.mlp_dtype == torch.bfloat16,
        **_FULLY, mp_policy=MixedPrecisionPolicy(torch.bfloat16),
    ),
    rank_choice(
        "fully_shard(send_dtype=torch.float8_e5m2)",
        "gradients are sent as bytes, in all-to-alls",
        lambda seen, options: any(
            call.op == "all_to_all" and call.dtype == "uint8" for call in seen.backward
        ),
        **_FULLY, send_dtype=torch.float8_e5m2,
    ),
    rank_choice(
        "fully_shard(flat=True)", "a quarter of the parameters, about; half with `replicate=2`",
        lambda seen, options: _share(seen) < (0.6 if "replicate" in options else 0.4),
        **_FULLY, tp="batch", flat=True,
    ),
)  # fmt: skip

CHOICES: Run = (*PARALLELIZE, *PLAN)


def run_options(choices: Run) -> dict[str, Any]:
    """Returns all options of a run of ``choices``, the number of ranks included."""
    return pairwise.run_options(choices, ranks_of)


def _covering_runs() -> tuple[Run, ...]:
    """Returns runs on two ranks of the pairs that need one mesh axis, then runs of the others.

    Runs of more than two choices count as accepted; the test that executes them shows whether they
    are.
    """

    def assumed(run: Run) -> Completion:
        return _completed(run) if len(run) == 2 else Completion(run, None)

    runs: tuple[Run, ...] = ()
    for other in ("tp", "dp", None):
        choices = tuple(one for one in CHOICES if other not in one.options)
        runs += pairwise.covering_runs(choices, assumed, lambda run: len(run) <= _MAX_CHOICES, runs)
    return runs


@dataclass(frozen=True)
class OptionPairs:
    """Which choices and pairs `parallelize` accepts on a mesh without processes.

    Attributes:
        refusals: each choice with its refusal, if any.
        pairs: every compatible pair of choices, with its refusal if any.
        runs: runs in which each accepted pair of choices occurs.
    """

    refusals: Mapping[Choice, str | None]
    pairs: tuple[Pair, ...]
    runs: tuple[Run, ...]


@functools.cache
def table() -> OptionPairs:
    """Returns the pairs, cached; a single mesh for all runs preserves torch's caches."""
    with fake_mesh((_MOST_RANKS,)):
        try:
            return OptionPairs(
                {choice: _completed((choice,)).refusal for choice in CHOICES},
                pairwise.pairs(CHOICES, _completed),
                _covering_runs(),
            )
        finally:
            _fake_mesh.cache_clear()
            uninstall()


def sentence_of(refusal: str | None) -> str | None:
    """Returns the first line of an error after its heading, without values."""
    if refusal is None:
        return None
    lines = [line for line in refusal.splitlines() if not line.endswith(":")]
    text = re.sub(r"\w+\.py:\d+: ", "", lines[0])
    return re.sub(r"\b(fully_shard|shard|sequence)\('.*?\)(?=[:;,]|$)", r"\1(...)", text)


@functools.cache
def _fake_mesh(axes: tuple[str, ...]) -> DeviceMesh:
    return mesh_of(dict.fromkeys(axes))


@functools.cache  # pairs and larger runs are asked for again and again
def _completed(choices: Run) -> Completion:
    """Calls `parallelize` with ``choices`` on a mesh without processes."""
    options = merged(choices) or {}
    try:
        build(options, _fake_mesh(axes_of(options)))
    except ValueError as error:
        return Completion((), str(error))
    return Completion(choices, None)
