"""The ways to train that comparisons name: a system, its ranks, and the degrees of its axes."""

from dataclasses import asdict, dataclass, field
from typing import Any

from integration.errors import UsageError
from integration.systems import Degrees, System, get_system

REFERENCE = "single"


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        name: how users choose it.
        system: that the trainer is told.
        ranks: processes.
        degrees: of a system that composes several kinds of parallelism.
    """

    name: str
    system: str
    ranks: int = 2
    degrees: Degrees = field(default_factory=Degrees)

    def make(self) -> System:
        """Return its system."""
        return get_system(self.system, self.degrees)

    @property
    def choices(self) -> dict[str, Any]:
        """Fields of the trainer's configuration."""
        return {"system": self.system, "ranks": self.ranks, **asdict(self.degrees)}


_ALL: tuple[Variant, ...] = (
    Variant(REFERENCE, "single", 1),
    Variant("ddp", "ddp"),
    Variant("fsdp1", "fsdp1"),
    Variant("fsdp2", "fsdp2"),
    Variant("fsdp", "fsdp"),
    Variant("dtensor-tp", "dtensor-tp"),
    Variant("plan-tp-sp", "plan", 2, Degrees(tp=2, sp=True)),
    Variant("plan-zero3", "plan", 2, Degrees(dp_shard=2, zero3=True)),
)
VARIANT_NAMES: tuple[str, ...] = tuple(variant.name for variant in _ALL)


def get_variant(name: str) -> Variant:
    """Return the variant called ``name``.

    Raises:
        UsageError: none has that name.
    """
    for variant in _ALL:
        if variant.name == name:
            return variant
    raise UsageError(f"unknown system {name!r}; choose one of: {', '.join(VARIANT_NAMES)}")
