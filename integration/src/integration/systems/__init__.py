"""The systems that ``--system`` names; ``_ALL`` lists their classes."""

from dataclasses import replace

import torch

from integration.device import CPU, Device
from integration.errors import UsageError
from integration.systems.base import System
from integration.systems.ddp import DataParallel
from integration.systems.deepspeed import ZeroThree
from integration.systems.degrees import REST, Degrees, Placements, SendDtype
from integration.systems.dtensor_tp import DTensorTensorParallel
from integration.systems.fsdp import FullyShardedBuffers
from integration.systems.fsdp1 import FullyShardedOne
from integration.systems.fsdp2 import FullyShardedTwo
from integration.systems.plan import PlanSystem
from integration.systems.single import SingleDevice
from integration.systems.torchtitan import TorchTitanStyle

_ALL: tuple[type[System], ...] = (
    SingleDevice,
    DataParallel,
    FullyShardedOne,
    FullyShardedTwo,
    FullyShardedBuffers,
    ZeroThree,
    DTensorTensorParallel,
    TorchTitanStyle,
    PlanSystem,
)
SYSTEM_NAMES: tuple[str, ...] = tuple(system.name for system in _ALL)

__all__ = ["REST", "SYSTEM_NAMES", "Degrees", "Placements", "SendDtype", "System", "get_system"]


def get_system(
    name: str,
    degrees: Degrees | None = None,
    compute_dtype: torch.dtype | None = None,
    device: Device = CPU,
) -> System:
    """Returns the system with this name.

    Args:
        name: name of the system.
        degrees: degrees of a system that composes several kinds of parallelism.
        compute_dtype: dtype of compute in mixed precision; None: the dtype of the weights.
        device: that models and meshes are on.

    Raises:
        UsageError: there is no such system, or it does not take degrees.
    """
    for system in _ALL:
        if system.name == name:
            others = degrees or Degrees()
            if system.accepts_placements:
                others = replace(others, placements=None)
            if system.accepts_offload:
                others = replace(others, offload=False)
            if system.accepts_send_dtype:
                others = replace(others, send_dtype=None)
            if others != Degrees() and not system.accepts_degrees:
                fit = [each.name for each in _ALL if each.accepts_degrees]
                if others == Degrees(placements=others.placements):
                    fit = [each.name for each in _ALL if each.accepts_placements]
                if others == Degrees(offload=True):
                    fit = [each.name for each in _ALL if each.accepts_offload]
                if others == Degrees(send_dtype=others.send_dtype):
                    fit = [each.name for each in _ALL if each.accepts_send_dtype]
                raise UsageError(
                    f"system {name!r} does not take {' '.join(others.options)}; leave it out, or"
                    f" use one of: {', '.join(fit)}"
                )
            return system(degrees, compute_dtype, device)
    raise UsageError(f"unknown system {name!r}; choose one of: {', '.join(SYSTEM_NAMES)}")
