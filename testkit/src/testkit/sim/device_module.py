"""``torch.sim``: what torch, DTensor and frameworks ask of a device's module."""
# ruff: noqa: D102 - the methods are torch.cuda's, and documented there

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

NAME = "sim"


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a simulated device.

    Attributes:
        name: for reports.
        total_memory: bytes, as of an accelerator of today; the host's memory is the limit.
        multi_processor_count: of streaming multiprocessors.
    """

    name: str = "simulated accelerator"
    total_memory: int = 80 * 2**30
    multi_processor_count: int = 1


class Stream(torch.Stream):
    """A stream of a simulated device; ``given`` are the numbers of one that exists."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if given:
            return super().__new__(cls, **given)
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    """An event of a simulated device."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        return super().__new__(cls, torch.device(NAME), enable_timing=enable_timing)


class DeviceModule(ModuleType):
    """The functions of ``torch.cuda`` that do not depend on CUDA, under their names there.

    A device is an index, a name, a `torch.device`, or None for the current one.

    Args:
        core: the compiled extension.
    """

    def __init__(self, core: ModuleType) -> None:
        super().__init__(f"torch.{NAME}", __doc__)
        self._core = core
        self.Stream, self.Event = Stream, Event
        self.device_count = core.device_count
        self.current_device = core.current_device
        self.set_stream = torch.accelerator.set_stream

    def init(self) -> None:
        """Does nothing, as the device is loaded."""

    _lazy_init = init

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return bool(self._core.device_count() > 0)

    def _is_in_bad_fork(self) -> bool:
        return False

    def set_device(self, device: Any) -> None:
        self._core.set_device(_index(device))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self._core.current_device()
        self._core.set_device(_index(device))
        try:
            yield
        finally:
            self._core.set_device(before)

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        return DeviceProperties()

    def get_device_name(self, device: Any = None) -> str:
        return DeviceProperties.name

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def current_stream(self, device: Any = None) -> Stream:
        stream = torch.accelerator.current_stream(torch.device(NAME, _index(device)))
        return _stream(stream.stream_id, stream)

    def default_stream(self, device: Any = None) -> Stream:
        return _stream(0, torch.accelerator.current_stream(torch.device(NAME, _index(device))))

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = self.current_stream(stream.device_index)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def synchronize(self, device: Any = None) -> None:
        torch.accelerator.synchronize(torch.device(NAME, _index(device)))

    def manual_seed(self, seed: int) -> None:
        self._core.default_generator(self._core.current_device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self._core.device_count()):
            self._core.default_generator(index).manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        state: torch.Tensor = self._core.default_generator(_index(device)).get_state()
        return state

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        self._core.default_generator(_index(device)).set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(self._core.device_count())]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for index, state in enumerate(states):
            self.set_rng_state(state, index)

    def memory_allocated(self, device: Any = None) -> int:
        return int(self._core.memory(_index(device))[0])

    def max_memory_allocated(self, device: Any = None) -> int:
        return int(self._core.memory(_index(device))[1])

    memory_reserved = memory_allocated  # nothing is cached
    max_memory_reserved = max_memory_allocated

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        now, peak = self._core.memory(_index(device))[:2]
        kinds = ("allocated_bytes", "active_bytes", "reserved_bytes")  # nothing is cached
        sizes = {"current": now, "peak": peak}
        return {f"{kind}.all.{when}": int(size) for kind in kinds for when, size in sizes.items()}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        torch.accelerator.reset_peak_memory_stats(torch.device(NAME, _index(device)))

    def empty_cache(self) -> None:
        """Does nothing, as nothing is cached."""


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _stream(number: int, like: torch.Stream) -> Stream:
    return Stream(stream_id=number, device_index=like.device_index, device_type=like.device_type)
