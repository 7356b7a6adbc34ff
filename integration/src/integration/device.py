"""The device that ``--device`` selects, with what depends on it: backends, streams, generators."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from integration.errors import UsageError

DeviceOption = Literal["auto", "cpu", "cuda", "sim"]
# testkit's simulated accelerator, which is used only where it is asked for.
_SIM = "sim"


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        type: as in `torch.device`.
    """

    type: str = "cpu"

    @property
    def is_accelerator(self) -> bool:
        """Whether it has memory and streams of its own."""
        return self.type != "cpu"

    @property
    def is_simulated(self) -> bool:
        """Whether its operators run on the host."""
        return self.type == _SIM

    @property
    def current(self) -> torch.device:
        """This rank's device."""
        if not self.is_accelerator:
            return torch.device("cpu")
        return torch.device(self.type, torch.accelerator.current_device_index())

    @property
    def backend(self) -> str:
        """Backends of the process group: one for the device, and gloo for the host's tensors.

        Objects, barriers and checkpoints are the host's.
        """
        if not self.is_accelerator:
            return "gloo"
        return f"cpu:gloo,{self.type}:{dist.get_default_backend_for_device(self.type)}"

    @property
    def name(self) -> str:
        """Name of the hardware."""
        return str(self._module.get_device_name()) if self.is_accelerator else "CPU"

    @property
    def peak_bytes(self) -> int:
        """Peak of the memory that tensors had on this rank's accelerator."""
        return int(self._module.max_memory_allocated()) if self.is_accelerator else 0

    def reset_peak(self) -> None:
        """Begins another measurement of ``peak_bytes``."""
        if self.is_accelerator:
            self._module.reset_peak_memory_stats()

    def start(self, local_rank: int | None, rank: int) -> None:
        """Makes one device this rank's, before there is a process group.

        Args:
            local_rank: of this rank on its host; None if its launcher does not tell.
            rank: of this rank, from which the local rank is computed then.
        """
        if self.is_simulated:
            _load_simulated()
        if self.is_accelerator:
            count = torch.accelerator.device_count()
            torch.accelerator.set_device_index(rank % count if local_rank is None else local_rank)

    @property
    def generator(self) -> torch.Generator:
        """The generator that operators on this rank's device draw from by default."""
        if self.type != "cuda":
            return torch.default_generator
        generators: Sequence[torch.Generator] = self._module.default_generators
        return generators[self.current.index]

    def random_state(self) -> dict[str, Tensor]:
        """Returns the state of the generator of the host and of this rank's device, by type."""
        states = {"cpu": torch.get_rng_state()}
        if self.is_accelerator:
            states[self.type] = self._module.get_rng_state()
        return states

    def set_random_state(self, states: dict[str, Tensor]) -> None:
        """Sets the state that `random_state` returned."""
        torch.set_rng_state(states["cpu"])
        if self.is_accelerator:
            self._module.set_rng_state(states[self.type])

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.type)


CPU = Device()


def select_device(option: DeviceOption, local_ranks: int = 1) -> Device:
    """Returns the device that an option names; neither loads nor initialises it.

    Args:
        option: ``auto`` is the accelerator of this machine, and the CPU where there is none for
            which torch has a backend of collectives.
        local_ranks: ranks on this machine, of which each has its own device.

    Raises:
        UsageError: there is no such device, or there are fewer than ranks.
    """
    device = Device(_automatic_type() if option == "auto" else option)
    if not device.is_accelerator:
        return device
    count = _simulated_count() if device.is_simulated else torch.accelerator.device_count()
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"--device cuda: expected a CUDA device, got none that torch {torch.__version__} finds;"
            " use --device cpu, or install a build of torch for CUDA and its driver"
        )
    if local_ranks > count:
        raise UsageError(
            f"--device {option}: expected at most {count} ranks on this machine, one for each"
            f" {device.type} device, got {local_ranks}; start fewer ranks, or use --device cpu"
        )
    return device


def local_ranks(ranks: int | None) -> int:
    """Returns how many ranks this machine has: ``ranks``, or as torchrun's environment says."""
    return ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _automatic_type() -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == _SIM:
        return "cpu"
    has_backend = found.type in dist.Backend.default_device_backend_map
    return found.type if has_backend else "cpu"


def _simulated_count() -> int:
    from testkit import sim

    return sim.device_count()


def _load_simulated() -> None:
    from testkit import sim

    sim.load()
