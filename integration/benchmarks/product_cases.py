"""The runs: products of parallelism, the single kinds that they are predicted from, and others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLES = 4  # of a step of a data parallel rank, and of its microbatch
MICROBATCHES = 2  # of a pipeline
MODES = ("Eager", "static")
EXPERTS = "mixtral"


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        name: its name, as in the tables.
        ranks: number of ranks.
        options: options of the trainer that differ from one device's.
        samples: samples of a step of all data parallel ranks.
        accumulated: whether microbatches have as many samples as those of a pipeline.
    """

    name: str
    ranks: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    samples: int = SAMPLES
    accumulated: bool = False

    def options_of(self, model: str) -> dict[str, Any]:
        """Returns the options of the trainer for a model."""
        shared = {"model": model, "global_batch": self.samples}
        micro_batch = SAMPLES // MICROBATCHES if self.accumulated else SAMPLES
        return shared | {"micro_batch": micro_batch} | dict(self.options)


_TP = {"tp": 2, "sp": True}
_PP = {"pp_degree": 2, "pp_microbatches": MICROBATCHES}
_TITAN = {"system": "torchtitan-style"}

ONE = Case("one device", 1)
ONE_ACCUMULATED = Case("one device, accumulated", 1, accumulated=True)


def _plan(
    name: str,
    ranks: int,
    mode: str,
    samples: int = SAMPLES,
    accumulated: bool = False,
    **options: Any,
) -> Case:
    own = {"system": "plan"} | ({"static": True} if mode == "static" else {}) | options
    return Case(f"{name}, {mode}", ranks, own, samples, accumulated)


@dataclass(frozen=True)
class Kinds:
    """The runs of single kinds on 2 ranks.

    Attributes:
        gathered_once: FSDP that keeps parameters gathered up to the end of the step.
        accumulated: TP with the microbatches of a pipeline.
        dp_ep: EP, whose ranks are those of replicated data parallelism.
    """

    fsdp: Case
    gathered_once: Case | None
    tp: Case
    accumulated: Case | None
    pp: Case | None
    dp: Case | None
    dp_ep: Case | None


def kinds_of(mode: str) -> Kinds:
    """Returns the runs of plans in a mode, or those of torchtitan-style."""
    if mode == "torchtitan-style":
        fsdp = Case("FSDP2, torchtitan-style", 2, _TITAN | {"dp_shard": 2}, 2 * SAMPLES)
        tp = Case("TP2 + SP, torchtitan-style", 2, _TITAN | _TP)
        return Kinds(fsdp, None, tp, None, None, None, None)
    both = 2 * SAMPLES
    return Kinds(
        fsdp=_plan("FSDP2", 2, mode, both, dp_shard=2),
        gathered_once=_plan("FSDP2, zero2", 2, mode, both, dp_shard=2, placements="zero2"),
        tp=_plan("TP2 + SP", 2, mode, **_TP),
        accumulated=_plan("TP2 + SP, accumulated", 2, mode, accumulated=True, **_TP),
        pp=_plan("PP2", 2, mode, **_PP),
        dp=_plan("DP2", 2, mode, both, dp_replicate=2),
        dp_ep=_plan("DP2 with EP2", 2, mode, both, dp_replicate=2, ep=2),
    )


@dataclass(frozen=True)
class Product:
    """A product of kinds.

    Attributes:
        mode: "Eager" or "static" of plans; or another system, and the predictions that it has.
        kinds: names of the kinds in it.
    """

    case: Case
    mode: str
    kinds: frozenset[str]


def products_of(mode: str, model: str) -> list[Product]:
    """Returns the products of a mode of plans, or of "torch": TorchTitan's way, with torch."""
    both = 2 * SAMPLES
    if mode == "torch":
        titan = Case("FSDP2 x TP2 + SP, torchtitan-style", 4, _TITAN | _TP | {"dp_shard": 2}, both)
        pipeline = Case("PP2 x FSDP2, fsdp2", 4, {"system": "fsdp2"} | _PP, both)
        return [
            Product(titan, "torchtitan-style", frozenset({"FSDP", "TP"})),
            Product(pipeline, "fsdp2", frozenset({"PP", "FSDP"})),
        ]
    found = {
        frozenset({"FSDP", "TP"}): _plan("FSDP2 x TP2 + SP", 4, mode, both, dp_shard=2, **_TP),
        frozenset({"PP", "FSDP"}): _plan("PP2 x FSDP2", 4, mode, both, dp_shard=2, **_PP),
        frozenset({"PP", "FSDP", "TP"}): _plan(
            "PP2 x FSDP2 x TP2 + SP", 8, mode, both, dp_shard=2, **_TP, **_PP
        ),
    }
    if model.startswith(EXPERTS):
        ep = _plan("FSDP2 with EP2", 2, mode, both, dp_shard=2, ep=2)
        found[frozenset({"FSDP", "EP"})] = ep
    return [Product(case, mode, kinds) for kinds, case in found.items()]


def two_ranks(model: str) -> list[Case]:
    """Returns the runs on 2 ranks whose wall times are compared."""
    titan = kinds_of("torchtitan-style")
    cases = [
        Case("FSDP2, fsdp2", 2, {"system": "fsdp2"}, 2 * SAMPLES),
        titan.fsdp,
        titan.tp,
        Case("PP2, torch", 2, {"system": "single"} | _PP),
    ]
    for mode in MODES:
        kinds = kinds_of(mode)
        assert kinds.pp is not None
        cases += [kinds.fsdp, kinds.tp, kinds.pp]
        cases += [each.case for each in products_of(mode, model) if "EP" in each.kinds]
    return cases
