"""A simulated accelerator, ``sim``: an asynchronous device without hardware.

`load` registers it. Its memory is the host's and its operators run on the host at once, so results
are the CPU's bit for bit; what a real device would be free to reorder is reported (`listen`), for
the race checker. `device_module` is ``torch.sim``, `build` compiles the extension in ``cpp/``.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from types import ModuleType

import torch
import torch.distributed as dist

from testkit.sim import build
from testkit.sim.device_module import NAME, DeviceModule

__all__ = ["BACKEND", "NAME", "device_count", "load", "start_device"]

BACKEND = "simccl"  # of torch.distributed; the default of the device


def device_count() -> int:
    """Returns how many devices there are, also before they are loaded: ``SIM_DEVICES``, or 8."""
    return int(os.environ.get("SIM_DEVICES", "8"))  # as cpp/device.cpp has it


@functools.cache
def load() -> ModuleType:
    """Registers the device in this process, which cannot be undone.

    ``torch.accelerator`` is the simulated device from here on, so it is loaded only where asked
    for.

    Returns:
        the compiled extension.

    Raises:
        RuntimeError: this process has another PrivateUse1 device.
    """
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", NAME):
        raise RuntimeError(
            f"testkit.sim: expected no other PrivateUse1 device in this process, got {name!r}; "
            f"load the simulated device in a process of its own"
        )
    core = build.extension()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, DeviceModule(core))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
        host = dist.ProcessGroupGloo(store, rank, size, timeout)
        return core.make_backend(host, rank, size)  # type: ignore[no-any-return]

    # A list: the letters of a string would be devices.
    dist.Backend.register_backend(BACKEND, backend, devices=[NAME])
    return core


def start_device(rank: int) -> str:
    """Loads the device, makes the one of a rank's number current, and returns its group's backends.

    Those of `torch.distributed.init_process_group`: gloo for the host's tensors, and the device's.
    """
    load()
    torch.get_device_module(NAME).set_device(rank)
    return f"cpu:gloo,{NAME}:{BACKEND}"
