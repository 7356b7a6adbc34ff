"""The compiled CPU stream against NumPy's: without torch, so that every supported Python runs it.

`test_mt19937`, `test_cpu_backend` and the tests of Philox compare it with torch.
"""

import importlib.machinery
import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest


def load():
    """Returns ``dist_rng._core``; where there is no torch, without its package."""
    if importlib.util.find_spec("torch") is not None:
        from dist_rng import _core

        return _core
    folder = Path(importlib.util.find_spec("dist_rng").submodule_search_locations[0])
    file = folder / f"_core{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    spec = importlib.util.spec_from_file_location("dist_rng._core", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


core = load()
BEST = core.instruction_set()
SEED, COUNT = 7, 3000
PLACES = [0, 1, 623, 624, 625, 1300]


@pytest.fixture(autouse=True, params=("baseline", "avx2", "avx512"))
def instruction_set(request):
    if not core.use_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield
    assert core.use_instruction_set(BEST)


def state_of(seed):
    """Returns the state of a CPU generator after ``manual_seed``: (5056,) uint8."""
    key = np.random.RandomState(seed).get_state()[1].astype(np.uint64)
    raw = struct.pack("<QiiQ", seed, 1, 1, 0) + key.tobytes()
    return np.frombuffer(raw.ljust(core.STATE_BYTES, b"\0"), np.uint8).copy()


def words_of(seed, count):
    return np.random.RandomState(seed).randint(0, 2**32, count, dtype=np.uint32)


def whole(count):
    return core.LocalGrid([[(0, count)]], [1], [1])


def integers(state, count):
    """Returns the lower 24 bits of the next words, and advances the state."""
    out = np.empty(count, np.int32)
    arguments = (core.Dtype.int32, whole(count), count, 2**24, 0)
    core.integers(state.ctypes.data, out.ctypes.data, *arguments)
    return out


@pytest.mark.parametrize("place", PLACES)
def test_words_after_a_skip_are_those_of_the_mersenne_twister(place):
    before, state = state_of(SEED), state_of(SEED)
    core.skip(state.ctypes.data, place)
    assert core.words_between(before.ctypes.data, state.ctypes.data, COUNT) == place
    wanted = words_of(SEED, COUNT)[place:] & 0xFFFFFF
    np.testing.assert_array_equal(integers(state, COUNT - place), wanted)


def uniform(seed, dtype, grid, out, release=core.TorchRelease.torch_2_11):
    state = state_of(seed)
    own = getattr(core.Dtype, dtype)
    arguments = (own, grid, COUNT, 0.0, 1.0, False, release)
    core.uniform(state.ctypes.data, out.ctypes.data, *arguments)
    return out


@pytest.mark.parametrize(
    "release", core.TorchRelease.__members__.values(), ids=lambda one: one.name
)
def test_a_uniform_float_is_24_bits_of_a_word(release):
    found = uniform(SEED, "float32", whole(COUNT), np.empty(COUNT, np.float32), release)
    wanted = (words_of(SEED, COUNT) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)
    np.testing.assert_array_equal(found, wanted)


def test_a_uniform_double_is_53_bits_of_two_words():
    found = uniform(SEED, "float64", whole(COUNT), np.empty(COUNT))
    words = words_of(SEED, 2 * COUNT).astype(np.uint64).reshape(-1, 2)
    pairs = words[:, 0] << np.uint64(32) | words[:, 1]
    np.testing.assert_array_equal(found, (pairs & np.uint64(2**53 - 1)) * 2.0**-53)


def test_a_part_of_a_tensor_gets_its_elements_of_the_whole():
    rows, columns = 60, 50  # COUNT
    full = uniform(SEED, "float32", whole(COUNT), np.empty(COUNT, np.float32))
    full = full.reshape(rows, columns)
    part = np.zeros((25, 10), np.float32)
    grid = core.LocalGrid([[(10, 20), (40, 55)], [(5, 15)]], [columns, 1], [10, 1])
    uniform(SEED, "float32", grid, part)
    np.testing.assert_array_equal(part, full[[*range(10, 20), *range(40, 55)], 5:15])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_has_the_known_answers_of_random123(counter, key, words):
    call, thread = counter[0] | counter[1] << 32, counter[2] | counter[3] << 32
    (found,) = core.philox_calls(key[0] | key[1] << 32, call, thread, 1)
    assert tuple(found) == words
