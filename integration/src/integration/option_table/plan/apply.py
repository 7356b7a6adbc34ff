"""Builds a plan with the entries of a run's options, and calls `parallelize` with the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp import Tiles
from integration.option_table.plan.model import PlanModel
from plan_api import Phase, Plan, deferred_init, lower, parallelize

__all__ = ["axes_of", "build", "make", "mesh_of", "plan_of", "ranks_of", "seed_of"]

PACKAGES = ("dist-rng", "dtensor-rules", "fused-comm")

_REPLICATED, _PARTIAL, _ROWS, _COLUMNS = Replicate(), Partial(), Shard(0), Shard(1)
_MATRICES = r"(?!routed).*\.weight"
_ALL, _BUT_EXPERTS = r".*\.grad", r"(?!.*experts).*\.grad"
_TILES = {r"mlp\.(up|down)\.weight": Tiles(rows=4, cols=4)}
_PHASES: dict[str, dict[Phase, Placement]] = {
    "ZeRO-1": {Phase.OPTIM: _ROWS},
    "ZeRO-2": {Phase.OPTIM: _ROWS, Phase.GRAD: _ROWS},
    "ZeRO-3": {Phase.INIT: _ROWS, Phase.RUN: _REPLICATED},
}


def axes_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the axes of a run's mesh, of two ranks each: those that its options need."""
    return tuple(axis for axis in ("dp", "tp") if axis in options) or ("dp",)


def ranks_of(options: Mapping[str, Any]) -> int:
    """Returns the number of ranks of a run."""
    return 1 << len(axes_of(options))


def mesh_of(options: Mapping[str, Any]) -> DeviceMesh:
    """Returns a run's mesh."""
    axes = axes_of(options)
    ranks = torch.arange(ranks_of(options)).view((2,) * len(axes))
    if ranks.numel() < dist.get_world_size():  # of a mesh without processes, for any run
        return DeviceMesh("cpu", ranks, mesh_dim_names=axes)
    return init_device_mesh("cpu", tuple(ranks.shape), mesh_dim_names=axes)


def seed_of(options: Mapping[str, Any], rank: int) -> int:
    """Returns the seed of a rank's weights: its own where one rank's weights are sent to all."""
    are_sent = options.get("src_data_rank") is not None
    return 10 + rank if are_sent and "deferred" not in options else 10


def make(options: Mapping[str, Any], seed: int) -> PlanModel:
    """Returns the model for one device."""
    torch.manual_seed(seed)
    return deferred_init(PlanModel, options) if "deferred" in options else PlanModel(options)


def build(options: Mapping[str, Any], mesh: DeviceMesh, rank: int = 0) -> PlanModel:
    """Makes the model and applies the plan.

    Args:
        options: options of a run.
        mesh: mesh of the run.
        rank: this rank.

    Raises:
        ValueError: the options are refused.
    """
    model = make(options, seed_of(options, rank))
    names = ("mode", "guard_steps", "src_data_rank", "bucket_mb", "strict", "overlap")
    arguments = {name: options[name] for name in names if name in options}
    if any(name in options for name in PACKAGES):
        arguments["use"] = tuple(name for name in PACKAGES if options.get(name))
    plan = plan_of(options, mesh)
    if "cover" in options:
        named = lower(plan_of({**options, "cover": False}, mesh), model).schedules
        for name in sorted(dict(model.named_parameters()).keys() - named.keys()):
            plan.shard(re.escape(name), [_REPLICATED] * mesh.ndim)
    parallelize(model, plan, **arguments)
    return model


def plan_of(options: Mapping[str, Any], mesh: DeviceMesh) -> Plan:
    """Returns the plan of a run: entries of its options, and annotations for static mode."""
    plan = Plan(mesh, cover=options.get("cover", False))
    dispatched = options.get("experts") == "dispatch"
    if options.get("tp") == "sequence":
        method, order = options["context"], options["order"]
        plan.sequence("<in>", "tp", order=order)
        plan.context("attention", "tp", method=method, order=order)
        # Experts to which tokens are sent have those of all ranks along tp.
        plan.annotate(_BUT_EXPERTS if dispatched else _ALL, _PARTIAL, "tp")
        plan.annotate("<out>", Shard(1), "tp")
    if "dp" in mesh.mesh_dim_names:  # type: ignore[operator]
        _shard_batch(plan, options)
    if options.get("tp") == "weights":
        plan.shard("<in>", _REPLICATED, "tp")
        _shard_weights(plan, options)
    if options.get("experts") in ("local", "index"):
        _experts_along_tp(plan, options["experts"])
    if "factory" in options:
        plan.factory("positions", [Shard(0) if a == "tp" else _REPLICATED for a in plan.axes])
        plan.redistribute("positions.<in>", _REPLICATED, Shard(2), "tp")
        plan.redistribute(
            "positions.<out>", Shard(2), _REPLICATED, "tp", grad_src=_REPLICATED
        )  # fmt: skip
    if "precision" in options:
        plan.precision(r"mlp\.(up|down)", options["precision"])
    if "recompute" in options:
        plan.recompute("mlp", options["recompute"])
    if "recompute_routed" in options:
        plan.recompute("routed", options["recompute_routed"])
    if "compile" in options:
        plan.compile("attention", options["compile"])
    if "eager" in options:
        plan.eager("mlp")
        if "dp" in plan.axes:
            along = ["dp", "tp"] if options.get("tp") == "batch" else ["dp"]
            plan.annotate("mlp.<in>", [_ROWS] * len(along), along)
        if options.get("tp") == "sequence":
            plan.annotate("mlp.<in>", Shard(1), "tp")
    return plan


def _shard_batch(plan: Plan, options: Mapping[str, Any]) -> None:
    along = ["dp", "tp"] if options.get("tp") == "batch" else ["dp"]
    placements, dispatched = [_ROWS] * len(along), options.get("experts") == "dispatch"
    plan.shard("<in>", placements, along)
    plan.annotate("dropout.<op:dropout>", placements, along)
    plan.annotate(_BUT_EXPERTS if dispatched else _ALL, [_PARTIAL] * len(along), along)
    for phase, placement in _PHASES.get(options.get("phase", ""), {}).items():
        plan.shard(_MATRICES, placement, "dp", phase)
    if dispatched:
        plan.shard(r"routed\.experts\.(up|down)", _ROWS, "dp").local("routed.experts", _ROWS, "dp")
        plan.dispatch(
            "routed.experts.<in:chosen>", _ROWS, "dp", tokens="x", weights="weights",
            count="number", chunks=options.get("chunks", 1),
        )  # fmt: skip
        if options.get("tp") == "sequence":  # experts' tokens are sharded by the batch only
            for name in ("x", "chosen", "weights"):
                plan.shard(f"routed.experts.<in:{name}>", _REPLICATED, "tp")
    elif "experts" in options:
        plan.local("routed.experts", _ROWS, "dp")
    if "out" not in options:
        plan.annotate("<out>", placements, along)
    else:
        plan.redistribute("<out>", _ROWS, _REPLICATED, "dp", grad_src=_REPLICATED, grad_dst=_ROWS)
    if "fully_shard" in options:
        names = (
            "reshard_after_forward", "granularity", "replicate", "flat", "mp_policy", "send_dtype",
        )  # fmt: skip
        arguments = {name: options[name] for name in names if name in options}
        quantize = _TILES if "quantize" in options else None
        plan.fully_shard("mlp", along, **arguments, quantize=quantize)
        plan.fully_shard("", along, **arguments)


def _shard_weights(plan: Plan, options: Mapping[str, Any]) -> None:
    unit = {"unit": options["unit"]} if "unit" in options else {}
    plan.shard(r"mlp\.up\.weight", _ROWS, "tp", **unit).shard(r"mlp\.up\.bias", _ROWS, "tp")
    plan.shard(r"mlp\.down\.weight", _COLUMNS, "tp")
    between = _COLUMNS if options.get("between") == "sequence" else _REPLICATED
    grad_dst = _PARTIAL if "grad_dst" in options else _REPLICATED
    plan.redistribute(
        "mlp.<in>", _REPLICATED, _REPLICATED, "tp", grad_src=_PARTIAL, grad_dst=grad_dst
    )
    if "grad_dst" in options:
        plan.annotate(r"first\..*\.grad", _PARTIAL, "tp")
    plan.redistribute("mlp.<out>", _PARTIAL, between, "tp")
    if between == _COLUMNS:
        plan.redistribute(
            "attention.<in>", between, _REPLICATED, "tp", grad_src=_REPLICATED, grad_dst=between
        )


def _experts_along_tp(plan: Plan, kind: str) -> None:
    if kind == "index":
        plan.shard(r"routed\.experts\.(up|down)", _ROWS, "tp")
        plan.index("routed.experts.<in:chosen>", _ROWS, "tp", count="number")
    else:
        plan.shard(r"routed\.experts\.up", Shard(1), "tp")
        plan.shard(r"routed\.experts\.down", Shard(2), "tp")
    for name in ("x", "weights"):
        plan.redistribute(
            f"routed.experts.<in:{name}>",
            _REPLICATED,
            _REPLICATED,
            "tp",
            grad_src=_PARTIAL,
            grad_dst=_REPLICATED,
        )
    plan.local("routed.experts", _PARTIAL, "tp")
    plan.redistribute("routed.experts.<out>", _PARTIAL, _REPLICATED, "tp")
