"""``torch.sim``: what torch, DTensor and frameworks ask of a device's module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

NAME = "sim"
_TOTAL_MEMORY = 80 * 2**30


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a simulated device.

    Attributes:
        name: for reports.
        total_memory: bytes, as of an accelerator of today; the host's memory is the limit.
        multi_processor_count: of streaming multiprocessors.
    """

    name: str = "simulated accelerator"
    total_memory: int = _TOTAL_MEMORY
    multi_processor_count: int = 1


def make_module(core: ModuleType) -> ModuleType:
    """``torch.sim`` on the compiled extension."""
    module = ModuleType(f"torch.{NAME}", __doc__)

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(core.current_device())
        if isinstance(device, int):
            return device
        index: int | None = torch.device(device).index
        return int(core.current_device()) if index is None else index

    class Stream(torch.Stream):
        """A stream of a simulated device."""

        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
            if given:  # from the stream's numbers, as torch makes it
                return super().__new__(cls, **given)
            return super().__new__(cls, torch.device(NAME, index_of(device)), priority=priority)

    class Event(torch.Event):
        """An event of a simulated device."""

        def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
            return super().__new__(cls, torch.device(NAME), enable_timing=enable_timing)

    def as_stream(stream: torch.Stream) -> Stream:
        return Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )

    def current_stream(device: Any = None) -> Stream:
        return as_stream(torch.accelerator.current_stream(torch.device(NAME, index_of(device))))

    def default_stream(device: Any = None) -> Stream:
        index = index_of(device)
        kind = torch.accelerator.current_stream(torch.device(NAME, index)).device_type
        return Stream(stream_id=0, device_index=index, device_type=kind)

    @contextmanager
    def stream(other: Any) -> Iterator[None]:
        if other is None:
            yield
            return
        before = current_stream(other.device_index)
        torch.accelerator.set_stream(other)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @contextmanager
    def device(which: Any) -> Iterator[None]:
        before = core.current_device()
        core.set_device(index_of(which))
        try:
            yield
        finally:
            core.set_device(before)

    def generators() -> list[torch.Generator]:
        return [core.default_generator(index) for index in range(core.device_count())]

    def manual_seed_all(seed: int) -> None:
        for generator in generators():
            generator.manual_seed(seed)

    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        for generator, state in zip(generators(), states, strict=True):
            generator.set_state(state)

    def synchronize(which: Any = None) -> None:
        torch.accelerator.synchronize(torch.device(NAME, index_of(which)))

    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: core.device_count() > 0,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": core.device_count,
        "current_device": core.current_device,
        "set_device": lambda which: core.set_device(index_of(which)),
        "get_device_name": lambda which=None: DeviceProperties.name,
        "get_device_properties": lambda which=None: DeviceProperties(),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda including_emulation=True: True,
        "manual_seed_all": manual_seed_all,
        "manual_seed": lambda seed: core.default_generator(index_of()).manual_seed(seed),
        "get_rng_state": lambda which=None: core.default_generator(index_of(which)).get_state(),
        "set_rng_state": lambda state, which=None: core.default_generator(
            index_of(which)
        ).set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators()],
        "set_rng_state_all": set_rng_state_all,
        "memory_allocated": lambda which=None: core.memory(index_of(which))[0],
        "max_memory_allocated": lambda which=None: core.memory(index_of(which))[1],
        "memory_reserved": lambda which=None: core.memory(index_of(which))[0],
        "max_memory_reserved": lambda which=None: core.memory(index_of(which))[1],
        "reset_peak_memory_stats": lambda which=None: torch.accelerator.reset_peak_memory_stats(
            torch.device(NAME, index_of(which))
        ),
        "empty_cache": lambda: None,
        "synchronize": synchronize,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "stream": stream,
        "set_stream": torch.accelerator.set_stream,
        "device": device,
        "Stream": Stream,
        "Event": Event,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
