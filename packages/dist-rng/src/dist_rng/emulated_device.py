"""The GPU whose numbers CPU tensors get, and the generators that stand for its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dist_rng.geometry import Geometry, LaunchPolicy, policy_of
from dist_rng.offset_mark import read_mark, write_mark


@dataclass(frozen=True)
class Position:
    """Where a CUDA generator stands."""

    seed: int
    offset: int


@dataclass
class EmulatedGenerators:
    """The CUDA generators that CPU generators stand for; see Note [dead bits]."""

    # What a generator last had; a seed of None is any seed.
    _last: "WeakKeyDictionary[torch.Generator, tuple[int | None, int]]" = field(
        default_factory=WeakKeyDictionary
    )

    def position(self, generator: torch.Generator) -> Position:
        """Return where the CUDA generator stands that ``generator`` stands for.

        Raises:
            ValueError: it is no CPU generator.
            RuntimeError: CPU draws and a new seed or state made its offset unknowable.
        """
        if generator.device.type != "cpu":
            raise ValueError(
                f"an emulated device draws with CPU generators, not with one on {generator.device}"
            )
        seed = generator.initial_seed()
        offset = read_mark(generator.get_state())
        if offset is None:
            offset = self._remembered(generator, seed)
        return Position(seed, offset)

    def move_to(self, generator: torch.Generator, offset: int) -> None:
        """Set the offset of the CUDA generator that ``generator`` stands for."""
        state = generator.get_state()
        write_mark(state, offset)
        generator.set_state(state)
        self._last[generator] = (generator.initial_seed(), offset)

    def reseeded(self) -> None:
        """Note that ``torch.manual_seed`` is about to seed the default generator."""
        self._last[torch.default_generator] = (None, 0)

    def _remembered(self, generator: torch.Generator, seed: int) -> int:
        known, offset = self._last.get(generator, (None, 0))
        is_default = generator is torch.default_generator
        if generator not in self._last or (is_default and known in (None, seed)):
            return offset
        raise RuntimeError(
            "this CPU generator stands for a CUDA generator, and has since drawn on the CPU or got"
            " another state, so that the CUDA offset is unknown; seed it just before, or use"
            " separate generators for CPU draws"
        )


@dataclass(frozen=True)
class EmulatedDevice:
    """A GPU whose stream CPU tensors get."""

    geometry: Geometry
    policy: LaunchPolicy
    generators: EmulatedGenerators = field(default_factory=EmulatedGenerators, compare=False)


_devices: list[EmulatedDevice] = []


@contextmanager
def emulated_device(geometry: Geometry) -> Iterator[EmulatedDevice]:
    """Give CPU tensors, from here on in this process, the numbers of a GPU of ``geometry``.

    It is a device of its own: its default generator begins with the seed of torch's default CPU
    generator and offset 0. ``torch.manual_seed`` seeds it again, ``torch.get_rng_state`` and
    ``set_rng_state`` carry its offset. Explicit CPU generators each stand for a CUDA generator.
    torch's own CPU draws go on undisturbed, as they would beside a GPU.
    """
    device = EmulatedDevice(geometry, policy_of(torch.__version__))
    before = _devices[-1].generators.position(torch.default_generator) if _devices else None
    replaced = _watch() if not _devices else {}
    _devices.append(device)
    device.generators.move_to(torch.default_generator, 0)
    try:
        yield device
    finally:
        _devices.remove(device)
        if _devices and before is not None:
            _devices[-1].generators.move_to(torch.default_generator, before.offset)
        else:
            state = torch.default_generator.get_state()
            write_mark(state, None)
            torch.default_generator.set_state(state)
        for (module, name), function in replaced.items():
            setattr(module, name, function)


def is_active() -> bool:
    """Return whether CPU tensors get a GPU's numbers at present."""
    return bool(_devices)


def active_device() -> EmulatedDevice | None:
    """Return the GPU whose numbers CPU tensors get at present, or None."""
    return _devices[-1] if _devices else None


def active_geometry() -> Geometry | None:
    """Return its geometry, or None."""
    return _devices[-1].geometry if _devices else None


def _watch() -> dict[tuple[Any, str], Any]:
    """Hook what torch calls when it seeds a CUDA generator, and when a state is taken."""
    seed_all, get_state = torch.cuda.manual_seed_all, torch.random.get_rng_state

    @wraps(seed_all)
    def manual_seed_all(seed: int) -> None:
        seed_all(seed)
        for device in _devices:
            device.generators.reseeded()

    @wraps(get_state)
    def get_rng_state() -> Tensor:
        # CPU draws may have washed the mark away: write it again, so that the state carries it.
        if _devices:
            generators = _devices[-1].generators
            offset = generators.position(torch.default_generator).offset
            generators.move_to(torch.default_generator, offset)
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
