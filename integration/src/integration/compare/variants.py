"""What experiments choose from: the variants of systems, and the sources of random numbers."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from integration.data import Modality
from integration.errors import UsageError
from integration.models import ModelShape
from integration.pipeline.schedules import SCHEDULES
from integration.systems import Degrees, System, get_system
from integration.train.config import DIST_RNG_RANDOM, NATIVE_RANDOM

REFERENCE = "single"
# Dropout probability of the runs with dropout.
DROPOUT = 0.1
# Degree of the pipelines that are compared.
_PP_DEGREE = 2


class Source(StrEnum):
    """The implementation that draws random numbers for DTensors: torch's own, or dist-rng's."""

    NATIVE = "native"
    DIST_RNG = "dist-rng"

    @property
    def option(self) -> str:
        """The value of the trainer's ``--random`` that selects it."""
        return NATIVE_RANDOM if self is Source.NATIVE else DIST_RNG_RANDOM


@dataclass(frozen=True)
class Variant:
    """A named configuration of a system.

    Attributes:
        name: its name on the command line.
        system: the trainer's ``--system``.
        ranks: number of processes.
        degrees: degrees of a system that composes several kinds of parallelism.
        schedule: schedule of a pipeline of degree 2, whose stages the system parallelizes; None:
            no pipeline.
        family: family of the models that it is compared on; None: every family that the system
            supports.
        in_full: whether it runs only if every case does, or if it is named.
    """

    name: str
    system: str
    ranks: int = 2
    degrees: Degrees = field(default_factory=Degrees)
    schedule: str | None = None
    family: str | None = None
    in_full: bool = False

    def make(self) -> System:
        """Returns the system."""
        return get_system(self.system, self.degrees)

    def takes(self, shape: ModelShape) -> bool:
        """Returns whether it supports models of ``shape``."""
        families = self.make().families if self.family is None else (self.family,)
        if self.degrees.loss_parallel and shape.modality is not Modality.TEXT:
            return False
        return families is None or shape.family in families

    @property
    def data_parallel_degree(self) -> int:
        """Number of ranks with different data."""
        stage_ranks = self.ranks if self.schedule is None else self.ranks // _PP_DEGREE
        return self.make().data_parallel_degree(stage_ranks)

    @property
    def draws_on_shards(self) -> bool:
        """Whether weights can be drawn on their shards, with one device's numbers."""
        return self.make().accepts_deferred_init

    @property
    def drops_out(self) -> bool:
        """Whether it supports dropout with one device's masks."""
        is_pipeline_of_one = self.system == REFERENCE and self.schedule is not None
        return is_pipeline_of_one or self.draws_on_shards

    @property
    def choices(self) -> dict[str, Any]:
        """Fields of the trainer's configuration."""
        pipeline = (
            {} if self.schedule is None else {"pp_degree": _PP_DEGREE, "pp_schedule": self.schedule}
        )
        return {"system": self.system, "ranks": self.ranks, **asdict(self.degrees), **pipeline}


def _plan(name: str, ranks: int, **degrees: Any) -> Variant:
    return Variant(name, "plan", ranks, Degrees(**degrees))


_TP_SP = _plan("plan-tp-sp", 2, tp=2, sp=True)
_FSDP = _plan("plan-fsdp", 2, dp_shard=2)


def _context(name: str, ranks: int, **degrees: Any) -> Variant:
    return Variant(name, "plan", ranks, Degrees(cp=2, **degrees), family="llama")


def _experts(name: str, ranks: int, **degrees: Any) -> Variant:
    return Variant(name, "plan", ranks, Degrees(**degrees), family="mixtral")


def _titan(name: str, ranks: int, family: str | None = None, **degrees: Any) -> Variant:
    options = Degrees(tp=2, sp=True, **degrees)
    return Variant(name, "torchtitan-style", ranks, options, family=family)


def _pipeline(
    schedule: str, name: str, family: str | None = None, *, in_full: bool = True, **degrees: Any
) -> Variant:
    return Variant(
        f"pp-{schedule}-plan-{name}", "plan", 4, Degrees(**degrees), schedule, family, in_full
    )


_FSDP_EP = _experts("plan-fsdp-ep", 2, dp_shard=2, ep=2)
_TITAN_FSDP = Variant("titan-fsdp", "torchtitan-style", 2, Degrees(dp_shard=2))
_TITAN_TP_SP = _titan("titan-tp-sp", 2)

# Systems of torch, whose random numbers on shards are shown beside dist-rng's.
NATIVE: tuple[Variant, ...] = (Variant("fsdp2", "fsdp2"), Variant("dtensor-tp", "dtensor-tp"))
# Plans, with all packages of this repository.
PRODUCTS: tuple[Variant, ...] = (
    _plan("plan-dp", 2, dp_replicate=2),
    _plan("plan-dp-static", 2, dp_replicate=2, static=True),
    _FSDP,
    _plan("plan-zero3", 2, dp_shard=2, zero3=True),
    _plan("plan-tp", 2, tp=2),
    _TP_SP,
    _plan("plan-tp-sp-static", 2, tp=2, sp=True, static=True),
    _plan("plan-tp-sp-loss", 2, tp=2, sp=True, loss_parallel=True),
    _plan("plan-hsdp", 4, dp_replicate=2, dp_shard=2),
    _plan("plan-fsdp-tp", 4, dp_shard=2, tp=2),
    _plan("plan-fsdp-tp-sp-static", 4, dp_shard=2, tp=2, sp=True, static=True),
    _plan("plan-dp-tp-sp", 4, dp_replicate=2, tp=2, sp=True),
    _plan("plan-dp-tp-sp-static", 4, dp_replicate=2, tp=2, sp=True, static=True),
    _context("plan-cp-ring", 2),
    _context("plan-cp-all-gather", 2, cp_method="all-gather"),
    _context("plan-cp-ulysses", 2, cp_method="ulysses"),
    _context("plan-dp-cp-ring", 4, dp_replicate=2),
    _context("plan-fsdp-cp-ring", 4, dp_shard=2),
    _context("plan-cp-tp-sp", 4, tp=2, sp=True),
    _experts("plan-ep", 2, dp_replicate=2, ep=2),
    _experts("plan-ep-static", 2, dp_replicate=2, ep=2, static=True),
    _experts("plan-tp-sp-ep", 2, tp=2, sp=True, ep=2),
    _FSDP_EP,
    _experts("plan-fsdp4-ep2", 4, dp_shard=4, ep=2),
    _experts("plan-hsdp-ep", 4, dp_replicate=2, dp_shard=2, ep=2),
    _experts("plan-dp-tp-sp-ep", 4, dp_replicate=2, tp=2, sp=True, ep=2),
    _experts("plan-dp-tp-sp-ep-static", 4, dp_replicate=2, tp=2, sp=True, ep=2, static=True),
)
# Pipelines that draw one device's masks, and plans within their stages one device's weights too.
PIPELINES: tuple[Variant, ...] = (
    Variant("pp-1F1B", REFERENCE, schedule="1F1B"),
    _pipeline("1F1B", "dp", dp_replicate=2),
    _pipeline("1F1B", "fsdp", dp_shard=2, in_full=False),
    _pipeline("Interleaved1F1B", "fsdp-static", dp_shard=2, static=True),
    _pipeline("1F1B", "zero3", dp_shard=2, zero3=True),
    _pipeline("1F1B", "tp-sp", tp=2, sp=True),
    _pipeline("ZBVZeroBubble", "tp-sp-static", tp=2, sp=True, static=True, in_full=False),
    _pipeline("1F1B", "tp-sp-loss", tp=2, sp=True, loss_parallel=True),
    _pipeline("1F1B", "fsdp-ep", "mixtral", dp_shard=2, ep=2, in_full=False),
    _pipeline("GPipe", "fsdp-ep-static", "mixtral", dp_shard=2, ep=2, static=True),
    _pipeline("1F1B", "cp-ring", "llama", cp=2),
)
# Systems that draw nothing on shards, and pipelines under every schedule: trained with unsharded
# init and no dropout.
PLAIN: tuple[Variant, ...] = (
    Variant("ddp", "ddp"),
    Variant("fsdp1", "fsdp1"),
    Variant("fsdp2", "fsdp2"),
    Variant("fsdp", "fsdp"),
    Variant("dtensor-tp", "dtensor-tp"),
    _TITAN_TP_SP,
    _titan("titan-tp-sp-loss", 2, loss_parallel=True),
    _titan("titan-fsdp-tp-sp-loss", 4, dp_shard=2, loss_parallel=True),
    _titan("titan-fsdp-tp-sp", 4, "dit", dp_shard=2),
    *(Variant(f"pp-{schedule}", "single", schedule=schedule) for schedule in SCHEDULES),
    Variant("pp-1F1B-ddp", "ddp", 4, schedule="1F1B"),
    Variant("pp-1F1B-fsdp", "fsdp", 4, schedule="1F1B", family="llama"),
)
# The systems whose curves, step times and memory are compared: on 2 ranks, one per core.
SYSTEMS: tuple[Variant, ...] = (
    Variant(REFERENCE, "single", 1),
    Variant("ddp", "ddp"),
    Variant("fsdp1", "fsdp1"),
    NATIVE[0],
    Variant("fsdp", "fsdp"),
    Variant("deepspeed", "deepspeed"),
    _TITAN_FSDP,
    _FSDP,
    NATIVE[1],
    _TITAN_TP_SP,
    _TP_SP,
    _FSDP_EP,
)
# Variants on more ranks than small machines have cores: they run if they are named only.
LARGE: tuple[Variant, ...] = (_plan("plan-hsdp-tp", 8, dp_replicate=2, dp_shard=2, tp=2),)
_ALL: dict[str, Variant] = {
    variant.name: variant for variant in (*SYSTEMS, *NATIVE, *PRODUCTS, *PIPELINES, *PLAIN, *LARGE)
}
VARIANT_NAMES: tuple[str, ...] = tuple(_ALL)


def get_variant(name: str) -> Variant:
    """Returns the variant with this name.

    Raises:
        UsageError: there is none.
    """
    if name not in _ALL:
        raise UsageError(f"unknown system {name!r}; choose one of: {', '.join(VARIANT_NAMES)}")
    return _ALL[name]


def names_in(text: str) -> tuple[str, ...]:
    """Returns the distinct names of a comma-separated list, in order."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
