"""The systems that a run can name; add one by adding its class to ``_ALL``."""

from integration.errors import UsageError
from integration.systems.base import System
from integration.systems.ddp import DataParallel
from integration.systems.dtensor_tp import DTensorTensorParallel
from integration.systems.fsdp import FullyShardedBuffers
from integration.systems.fsdp1 import FullyShardedOne
from integration.systems.fsdp2 import FullyShardedTwo
from integration.systems.plan import PlanTensorSequence, PlanZeroThree
from integration.systems.single import SingleDevice

_ALL: tuple[type[System], ...] = (
    SingleDevice,
    DataParallel,
    FullyShardedOne,
    FullyShardedTwo,
    FullyShardedBuffers,
    DTensorTensorParallel,
    PlanTensorSequence,
    PlanZeroThree,
)
SYSTEM_NAMES: tuple[str, ...] = tuple(system.name for system in _ALL)

__all__ = ["SYSTEM_NAMES", "System", "get_system"]


def get_system(name: str) -> System:
    """Return the system called ``name``.

    Raises:
        UsageError: no system has that name.
    """
    for system in _ALL:
        if system.name == name:
            return system()
    raise UsageError(f"unknown system {name!r}; choose one of: {', '.join(SYSTEM_NAMES)}")
