"""Prints a recommendation, and writes its recipe and its plan."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from fsdp.simulate.report import format_bytes, format_seconds
from integration.models import build_model_on_meta, model_shape
from integration.recommend.options import RecommendSetup
from integration.recommend.prediction import Prediction
from integration.recommend.search import Recommendation
from integration.report.section import Column, Table
from integration.systems.base import LayerPolicies
from integration.systems.zoo import add_layer_policies, plan_of
from integration.train.config import TrainConfig, degrees_of
from integration.train.folders import make_folder
from testkit import fake_mesh

__all__ = [
    "as_json",
    "microbatches",
    "options_of",
    "product",
    "recommendation_table",
    "sentences",
    "write",
]

# Of validation alone, not of a recipe.
_LEFT_OUT = ("device", "ranks", "out")
_DEFAULTS = TrainConfig()


def options_of(config: TrainConfig) -> dict[str, Any]:
    """Returns the trainer's options of a candidate that have other values than by default."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {
        name: value
        for name, value in values.items()
        if value != getattr(_DEFAULTS, name) and name not in _LEFT_OUT
    }


def recommendation_table(found: Recommendation) -> Table:
    """Returns a row for each recommendation."""
    columns = (
        Column("", is_number=True, terminal=""),
        Column("ranks", terminal="ranks"),
        Column("microbatches", terminal="microbatches"),
        Column("options", terminal="options"),
        Column("step", is_number=True, terminal="step"),
        Column("memory", is_number=True, terminal="memory"),
        Column("sent", is_number=True, terminal="sent"),
        Column("why", terminal="why"),
    )
    rows = [_row(number, each) for number, each in enumerate(found.ranked, 1)]
    return Table(columns, tuple(rows), title="Fastest first; predicted, of a rank")


def _row(number: int, each: Prediction) -> tuple[str, ...]:
    config = each.config
    parts, size = microbatches(config)
    return (
        str(number), product(config), f"{parts} of {size}", _words(config),
        format_seconds(each.time.total), format_bytes(each.memory.total), format_bytes(each.sent),
        each.time.reason,
    )  # fmt: skip


def microbatches(config: TrainConfig) -> tuple[int, int]:
    """Returns the number of microbatches of a rank's step, and the samples of one."""
    samples = config.global_batch // (config.dp_replicate * config.dp_shard)
    size = config.micro_batch
    if config.pp_degree > 1:
        size //= config.pp_microbatches or 1
    return samples // size, size


def product(config: TrainConfig) -> str:
    """Returns the degrees above 1, as "PP2 FSDP4 TP8"."""
    degrees = {
        "PP": config.pp_degree, "DP": config.dp_replicate, "FSDP": config.dp_shard,
        "CP": config.cp, "TP": config.tp, "EP": config.ep,
    }  # fmt: skip
    return " ".join(f"{name}{size}" for name, size in degrees.items() if size > 1) or "1"


def _words(config: TrainConfig) -> str:
    words = {
        config.placements or "": config.placements is not None,
        "recompute": config.activation_checkpointing != "none",
        "offload": config.offload,
    }
    return " ".join(word for word, has in words.items() if has)


def sentences(setup: RecommendSetup, found: Recommendation) -> list[str]:
    """Returns what was predicted, what does not fit, and what the trainer refuses."""
    limit = f"{setup.memory / 1e9:g} GB"
    lines = [
        f"{found.candidates:,} candidates, of which {found.too_large:,} do not fit in {limit}."
    ]
    if not found.ranked and found.smallest is not None:
        least = found.smallest
        lines.append(
            f"Nothing fits: the smallest takes {format_bytes(least.memory.total)}, with "
            f"{' '.join(f'{name}={value}' for name, value in options_of(least.config).items())};"
            " use more ranks, more --memory, or --optimizer adam8bit."
        )
    lines += [f"Refused by the trainer ({n}): {error}" for error, n in found.refused.items()]
    return lines


def as_json(setup: RecommendSetup, found: Recommendation) -> dict[str, Any]:
    """Returns a recommendation for machines."""
    return {
        "ranks": setup.options.ranks,
        "memory": setup.memory,
        "hardware": asdict(setup.hardware),
        "candidates": found.candidates,
        "too_large": found.too_large,
        "refused": found.refused,
        "recommendations": [
            {
                "options": options_of(each.config),
                "seconds": each.time.total,
                "seconds_by_term": asdict(each.time),
                "bytes": each.memory.total,
                "bytes_by_kind": asdict(each.memory),
                "sent": each.sent,
                "why": each.time.reason,
            }
            for each in found.ranked
        ],
    }


def write(setup: RecommendSetup, best: Prediction, out: Path) -> list[Path]:
    """Writes recipe.toml and plan.json; returns their paths.

    Raises:
        UsageError: the folder cannot be made.
    """
    make_folder(out)
    recipe, plan = out / "recipe.toml", out / "plan.json"
    recipe.write_text(_recipe(setup, best))
    plan.write_text(_plan(best.config, setup.options.ranks) + "\n")
    return [recipe, plan]


def _recipe(setup: RecommendSetup, best: Prediction) -> str:
    options = setup.options
    head = (
        f"# {options.model} on {options.ranks:,} ranks of {options.hardware}, recommended by"
        " python -m integration.recommend.\n"
        f"# Predicted: {format_seconds(best.time.total)} for a step ({best.time.reason}),"
        f" {format_bytes(best.memory.total)} of a rank.\n"
        f"# python -m integration.train --config recipe.toml, under torchrun, or with --ranks.\n"
    )
    lines = [f"{name} = {json.dumps(value)}" for name, value in options_of(best.config).items()]
    return head + "\n".join(lines) + "\n"


def _plan(config: TrainConfig, ranks: int) -> str:
    """Returns the plan of a rank's stage as text, with values for the model's parameters."""
    shape, degrees = model_shape(config.model), degrees_of(config)
    axes = degrees.axes
    model = build_model_on_meta(shape)
    with fake_mesh((ranks // config.pp_degree,)):
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        plan = plan_of(shape, mesh, degrees, in_pipeline=config.pp_degree > 1)
        policies = LayerPolicies(config.activation_checkpointing)
        add_layer_policies(plan, policies, shape, len(shape.layers_of(model)))
        return plan.resolved(model).to_json()
