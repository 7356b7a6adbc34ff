"""The products of parallelism that the comparison trains, and their runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from integration.compare.experiment import SharedOptions
from integration.compare.experiments.parallelism import EXPERIMENT, ParallelOptions
from integration.compare.run import Run
from integration.compare.variants import Variant, get_variant

__all__ = ["NATIVE", "Product", "compared_runs", "mode_of", "product_of", "products"]

# Peers, whose products say nothing about this repository's packages.
NATIVE = ("fsdp1", "fsdp2", "dtensor-tp", "torchtitan-style")
# Samples of a step, and of one device's microbatch.
_GLOBAL_BATCH, _MICRO_BATCH = 8, 4
# Microbatches that a pipeline makes of the samples of a step.
_PP_MICROBATCHES = _GLOBAL_BATCH // _MICRO_BATCH

_DEGREES = ("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp_degree")
_FLAGS = ("sp", "loss_parallel", "zero3")


@dataclass(frozen=True)
class Product:
    """A product of kinds of parallelism.

    Attributes:
        name: its kinds, such as "PP x FSDP".
        variant: the first variant of the comparison that has it, in Eager mode.
    """

    name: str
    variant: Variant

    @property
    def options(self) -> dict[str, Any]:
        """Options of the trainer that train it, with one device's samples at a time."""
        variant = self.variant
        step = _MICRO_BATCH if variant.schedule is None else _GLOBAL_BATCH
        shares = variant.schedule is not None or variant.make().shards_batches
        parts = {} if variant.schedule is None else {"pp_microbatches": _PP_MICROBATCHES}
        return {
            **variant.choices,
            **parts,
            "model": f"{variant.family or 'llama'}-tiny",
            "global_batch": _GLOBAL_BATCH,
            "micro_batch": step // variant.data_parallel_degree if shares else step,
        }

    @property
    def one_device(self) -> dict[str, Any]:
        """Options of the trainer that train the same on one device."""
        batches = {"global_batch": _GLOBAL_BATCH, "micro_batch": _MICRO_BATCH}
        return {"model": self.options["model"], **batches}

    def is_in(self, options: Mapping[str, Any]) -> bool:
        """Returns whether a run with these options trains this product, in either mode."""
        return self._own_key == _key(options)

    @functools.cached_property
    def _own_key(self) -> tuple[Any, ...]:
        return _key(self.options)


def product_of(variant: Variant, *, schedule: bool = True) -> str:
    """Returns the kinds of parallelism of a variant, such as "FSDP x TP x SP".

    Args:
        variant: the variant.
        schedule: whether to name the schedule of a pipeline.
    """
    degrees = variant.degrees
    systems = {"ddp": "DP", "fsdp": "FSDP", "fsdp1": "FSDP", "fsdp2": "FSDP", "dtensor-tp": "TP"}
    names = [systems[variant.system]] if variant.system in systems else []
    if degrees.dp_replicate > 1 and degrees.dp_shard > 1:
        names.append("HSDP")
    elif degrees.dp_shard > 1:
        names.append("ZeRO-3 by phases" if degrees.zero3 else "FSDP")
    elif degrees.dp_replicate > 1:
        names.append("DP")
    names += [f"CP ({degrees.cp_method})"] * (degrees.cp > 1) + ["TP"] * (degrees.tp > 1)
    names += ["SP"] * degrees.sp + ["loss parallel"] * degrees.loss_parallel
    names += ["EP"] * (degrees.ep > 1)
    pipeline = f"PP ({variant.schedule})" if schedule else "PP"
    return " x ".join([pipeline] * (variant.schedule is not None) + names)


def mode_of(variant: Variant) -> str:
    """Returns the trainer's system of a variant, and plan-api's mode."""
    mode = ", static" if variant.degrees.static else ", Eager"
    return f"`{variant.system}`{mode if variant.system == 'plan' else ''}"


def compared_runs(own: ParallelOptions) -> list[Run]:
    """Returns the runs of the comparison that have a verdict."""
    runs = EXPERIMENT.runs(EXPERIMENT.setting(SharedOptions(), own))
    return [run for run in runs if run.reference is not None and run.judged]


@functools.cache
def products() -> tuple[Product, ...]:
    """Returns every product that the packages of this repository train, pipelines last.

    Without a pipeline DDP is torch's alone, and not among them.
    """
    found: dict[tuple[Any, ...], Product] = {}
    for name in dict.fromkeys(run.job.system for run in compared_runs(EXPERIMENT.full)):
        variant = get_variant(name)
        if variant.system in NATIVE or (variant.system == "ddp" and variant.schedule is None):
            continue
        eager = replace(variant, degrees=replace(variant.degrees, static=False))
        found.setdefault(_key(eager.choices), Product(product_of(eager, schedule=False), eager))
    return tuple(sorted(found.values(), key=lambda product: product.variant.schedule is not None))


def _key(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what options of the same product have in common, whatever its degrees."""
    degrees = tuple(options.get(name, 1) > 1 for name in _DEGREES)
    flags = tuple(bool(options.get(name)) for name in _FLAGS)
    name = options.get("cp_method", "ring").partition(":")[0]
    method = name if options.get("cp", 1) > 1 else None
    return (options["system"], method, *degrees, *flags)
