"""The emulated GPU, and CPU generators used as its CUDA generators."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from dist_rng.emulation.stored_offset import read_offset, write_offset
from dist_rng.philox.geometry import Geometry, LaunchPolicy, policy_of


@dataclass(frozen=True)
class GeneratorPosition:
    """The position of a CUDA generator in its stream."""

    seed: int
    offset: int


@dataclass
class EmulatedGenerators:
    """The seeds and offsets of CPU generators used as CUDA generators; see Note [unused bits]."""

    # The last (seed, offset) of a generator; a seed of None matches every seed. Not by weak
    # references, which torch 2.11's generators do not support: they end with the device.
    _last: dict[torch.Generator, tuple[int | None, int]] = field(default_factory=dict)

    def position(self, generator: torch.Generator) -> GeneratorPosition:
        """Returns the position of the CUDA generator that ``generator`` represents.

        Raises:
            ValueError: it is not a CPU generator.
            RuntimeError: its offset is unknown after CPU draws and a new seed or state.
        """
        if generator.device.type != "cpu":
            raise ValueError(
                f"an emulated device: expected a CPU generator, got one on {generator.device}"
            )
        seed = generator.initial_seed()
        offset = read_offset(generator.get_state())
        if offset is None:
            offset = self._remembered(generator, seed)
        return GeneratorPosition(seed, offset)

    def set_offset(self, generator: torch.Generator, offset: int) -> None:
        """Sets the offset of the CUDA generator that ``generator`` represents."""
        state = generator.get_state()
        write_offset(state, offset)
        generator.set_state(state)
        self._last[generator] = (generator.initial_seed(), offset)

    def on_manual_seed(self) -> None:
        """Resets the offset, as ``torch.manual_seed`` is about to seed the default generator."""
        self._last[torch.default_generator] = (None, 0)

    def _remembered(self, generator: torch.Generator, seed: int) -> int:
        last_seed, offset = self._last.get(generator, (None, 0))
        is_default = generator is torch.default_generator
        if generator not in self._last or (is_default and last_seed in (None, seed)):
            return offset
        raise RuntimeError(
            "expected a CPU generator with a known CUDA offset, got one that has drawn on the CPU"
            " or got another state since it was used as a CUDA generator; seed it immediately"
            " before, or use separate generators for CPU draws"
        )


@dataclass(frozen=True)
class EmulatedDevice:
    """A GPU whose stream is drawn into CPU tensors."""

    geometry: Geometry
    policy: LaunchPolicy
    generators: EmulatedGenerators = field(default_factory=EmulatedGenerators, compare=False)


_devices: list[EmulatedDevice] = []


@contextmanager
def emulated_device(geometry: Geometry) -> Iterator[EmulatedDevice]:
    """Draws the numbers of a GPU of ``geometry`` into CPU tensors inside the context, process-wide.

    The GPU has its own generators. Its default generator starts with the seed of torch's default
    CPU generator and offset 0. ``torch.manual_seed`` seeds it again; ``torch.get_rng_state`` and
    ``set_rng_state`` include its offset. Each explicit CPU generator represents a CUDA generator.
    torch's CPU draws are not affected, as on a machine with a GPU.

    It patches ``torch.cuda.manual_seed_all`` and ``torch.get_rng_state``, also under their names in
    ``torch.cuda.random`` and ``torch.random``, and restores them at the end.
    """
    device = EmulatedDevice(geometry, policy_of(torch.__version__))
    before = _devices[-1].generators.position(torch.default_generator) if _devices else None
    replaced = _patch_generator_functions() if not _devices else {}
    _devices.append(device)
    device.generators.set_offset(torch.default_generator, 0)
    try:
        yield device
    finally:
        _devices.remove(device)
        if _devices and before is not None:
            _devices[-1].generators.set_offset(torch.default_generator, before.offset)
        else:
            state = torch.default_generator.get_state()
            write_offset(state, None)
            torch.default_generator.set_state(state)
        for (module, name), function in replaced.items():
            setattr(module, name, function)


def is_active() -> bool:
    """Returns whether a GPU is being emulated."""
    return bool(_devices)


def active_device() -> EmulatedDevice | None:
    """Returns the GPU that is being emulated, or None."""
    return _devices[-1] if _devices else None


def active_geometry() -> Geometry | None:
    """Returns the geometry of the GPU that is being emulated, or None."""
    return _devices[-1].geometry if _devices else None


def _patch_generator_functions() -> dict[tuple[Any, str], Any]:
    """Patches the functions that seed CUDA generators and read the state; returns the originals."""
    seed_all, get_state = torch.cuda.manual_seed_all, torch.random.get_rng_state

    @wraps(seed_all)
    def manual_seed_all(seed: int) -> None:
        seed_all(seed)
        for device in _devices:
            device.generators.on_manual_seed()

    @wraps(get_state)
    def get_rng_state() -> Tensor:
        # CPU draws may have overwritten the stored offset: write it again into the state.
        if _devices:
            generators = _devices[-1].generators
            offset = generators.position(torch.default_generator).offset
            generators.set_offset(torch.default_generator, offset)
        return get_state()

    replaced: dict[tuple[Any, str], Any] = {}
    for module, name, function in (
        (torch.cuda, "manual_seed_all", manual_seed_all),
        (torch.cuda.random, "manual_seed_all", manual_seed_all),
        (torch, "get_rng_state", get_rng_state),
        (torch.random, "get_rng_state", get_rng_state),
    ):
        replaced[module, name] = getattr(module, name)
        setattr(module, name, function)
    return replaced
