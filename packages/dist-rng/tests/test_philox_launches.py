"""Philox, and the order in which torch's kernels use its words.

The order is compared with torch's kernels run literally: every block, thread and turn of every
loop. The simulations do not use the closed form; they yield, in the order of the writes,
(linear index, words of the call, lane).
"""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_rng import _core
from dist_rng.philox.geometry import Geometry
from dist_rng.philox.launches import (
    QUADS,
    STRIDED,
    AccessPattern,
    Launch,
    WordSource,
    dropout_access,
    fits_32_bits,
    launch_schedule,
    split_32_bits,
)
from dist_rng.philox.reference import philox4x32, words

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
BLOCK = 256
SMALL = Geometry(3, 512)  # at most 1536 threads, so that small tensors fill it


@dataclass
class Curand:
    """curandStatePhilox4_32_10_t after curand_init(seed, subsequence, offset)."""

    seed: int
    subsequence: int
    offset: int

    def __post_init__(self):
        assert self.offset % 4 == 0
        self.counter = [0, 0, self.subsequence & 0xFFFFFFFF, self.subsequence >> 32]
        self._add(self.offset // 4 & 0xFFFFFFFF)
        self.counter[1] += self.offset // 4 >> 32
        self._add(0)

    def _add(self, low):
        self.counter[0] += low
        for place in range(3):
            self.counter[place + 1] += self.counter[place] >> 32
            self.counter[place] &= 0xFFFFFFFF

    def call(self):
        key = (self.seed & 0xFFFFFFFF, self.seed >> 32)
        made = philox4x32(tuple(self.counter), key)
        self._add(1)
        return made


def grid_blocks(numel, geometry):
    """calc_execution_policy."""
    return min(
        geometry.sm_count * (geometry.max_threads_per_sm // BLOCK), (numel + BLOCK - 1) // BLOCK
    )


def strides(numel, unroll, geometry, seed, offset):
    """distribution_elementwise_grid_stride_kernel, and fused_dropout_kernel."""
    blocks = grid_blocks(numel, geometry)
    for block in range(blocks):
        for thread in range(BLOCK):
            index = block * BLOCK + thread
            state = Curand(seed, index, offset)
            step = BLOCK * blocks
            rounded = ((numel - 1) // (step * unroll) + 1) * step * unroll
            linear = index
            while linear < rounded:
                made = state.call()
                for lane in range(unroll):
                    place = linear + step * lane
                    if place < numel:
                        yield place, made, lane
                linear += step * unroll


def vectors(numel, vector, geometry, seed, offset):
    """fused_dropout_kernel_vec."""
    blocks = grid_blocks(numel, geometry)
    for block in range(blocks):
        for thread in range(BLOCK):
            index = block * BLOCK + thread
            state = Curand(seed, index, offset)
            linear = index * vector
            while linear < numel:
                calls = [state.call() for _ in range((vector + 3) // 4)]
                for part, made in enumerate(calls):
                    for lane in range(min(vector, 4)):
                        yield linear + part * 4 + lane, made, lane
                linear += blocks * BLOCK * vector


def quads(numel, seed, offset):
    """bernoulli_tensor_cuda_kernel under CUDA_tensor_apply2<..., 4, ..., 512, 2>."""
    blocks = (numel + 512 * 4 - 1) // (512 * 4)
    for thread in range(blocks * 512):
        linear = thread * 4
        while linear < numel:
            made = Curand(seed, thread, offset).call()
            for lane in range(min(4, numel - linear)):
                yield linear + lane, made, lane
            linear += blocks * 512 * 4


def advance_of_strides(numel, unroll, geometry):
    """counter_offset of calc_execution_policy and of dropout_cuda."""
    return ((numel - 1) // (BLOCK * grid_blocks(numel, geometry) * unroll) + 1) * 4


@pytest.mark.parametrize(
    ("rounds", "given", "expected"),
    [
        (7, (0,) * 6, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, (ONES,) * 6, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
        (10, (0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (10, (ONES,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_known_answers_of_random123(rounds, given, expected):
    # kat_vectors of github.com/DEShawResearch/random123
    assert philox4x32(given[:4], given[4:], rounds) == expected


@pytest.mark.parametrize("name", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("seed", [0, 42, 2**64 - 1, 0x123456789ABCDEF])
def test_compiled_calls_equal_the_reference(name, seed):
    before = _core.instruction_set()
    if not _core.use_instruction_set(name):
        pytest.skip(f"this processor lacks {name}")
    try:
        for call in (0, 1, 2**32 - 1, 2**32, 2**61):
            for thread in (0, 2**31 - 20, 2**32 - 20):
                made = _core.philox_calls(seed, call, thread, 41)
                expected = [words(seed, 4 * call, WordSource(thread + i, 0, 0)) for i in range(41)]
                assert [tuple(four) for four in made] == expected
    finally:
        _core.use_instruction_set(before)


def closed_form(access, numel, geometry, seed, offset):
    """(words, lane) of every element, by LaunchSchedule and Launch.word_source."""
    launch = launch_schedule(access, numel, 1, geometry).launches[0]
    places = [launch.word_source(draw) for draw in range(numel)]
    return [(words(seed, offset, place), place.lane) for place in places]


def in_order(elements, numel):
    """Returns the simulation's elements by index; each must occur exactly once."""
    table = {}
    for index, made, lane in elements:
        assert index not in table, f"element {index} was drawn twice"
        table[index] = (made, lane)
    assert len(table) == numel
    return [table[index] for index in range(numel)]


@pytest.mark.parametrize("unroll", [2, 4])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1535, 1536, 1537, 6144, 6145, 7001])
@pytest.mark.parametrize("geometry", [SMALL, Geometry(1, 256)], ids=["3x512", "1x256"])
def test_strides_equal_a_literal_launch(unroll, numel, geometry):
    seed, offset = 2**40 + 7, 4 * (2**32 - 1)  # the counter carries
    literal = in_order(strides(numel, unroll, geometry, seed, offset), numel)
    assert closed_form(STRIDED[unroll], numel, geometry, seed, offset) == literal
    advance = advance_of_strides(numel, unroll, geometry)
    assert launch_schedule(STRIDED[unroll], numel, 4, geometry).advance == advance


@pytest.mark.parametrize("vector", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 255, 257, 1536, 1537, 1800])
def test_vectors_equal_a_literal_launch(vector, groups):
    numel, seed, offset = groups * vector, 99, 16
    access = dropout_access(numel, 16 // vector)
    assert access.vector == vector
    literal = in_order(vectors(numel, vector, SMALL, seed, offset), numel)
    assert closed_form(access, numel, SMALL, seed, offset) == literal
    # dropout_cuda advances the offset as if there were no vectors.
    assert launch_schedule(access, numel, 1, SMALL).advance == advance_of_strides(numel, 4, SMALL)


@pytest.mark.parametrize("numel", [1, 3, 4, 5, 2047, 2048, 2049, 5001])
def test_quads_equal_a_literal_launch(numel):
    literal = in_order(quads(numel, 5, 8), numel)
    assert closed_form(QUADS, numel, SMALL, 5, 8) == literal
    assert launch_schedule(QUADS, numel, 4, SMALL).advance == 12


@pytest.mark.parametrize(
    ("numel", "itemsize", "vector"),
    [
        (1024, 4, 4),
        (1024, 2, 8),
        (1024, 8, 2),
        (1028, 2, 4),
        (1026, 2, 2),
        (1026, 4, 2),
        (1025, 2, 0),
        (1025, 8, 0),
        (1, 4, 0),
    ],
)
def test_dropout_uses_the_largest_vector_that_divides_the_tensor(numel, itemsize, vector):
    assert dropout_access(numel, itemsize).vector == vector


@pytest.mark.parametrize(
    ("itemsize", "largest"),
    [(1, 2**31 - 1), (2, 2**30), (4, 2**29), (8, 2**28)],
)
def test_32_bit_indexing_ends_where_a_byte_offset_overflows(itemsize, largest):
    assert fits_32_bits(largest, itemsize)
    assert not fits_32_bits(largest + 1, itemsize)


ACCESS_PATTERNS = {
    "unroll 4": STRIDED[4],
    "unroll 2": STRIDED[2],
    "vector 8": AccessPattern(4, 8, splits=False),
    "vector 4": AccessPattern(4, 4, splits=False),
    "vector 2": AccessPattern(4, 2, splits=False),
    "quads": QUADS,
}


@given(
    numel=st.integers(1, 2**36),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    geometry=st.sampled_from([Geometry.H100, Geometry.L4, SMALL]),
)
def test_launches_cover_a_tensor_of_any_size_once(numel, itemsize, geometry):
    schedule = launch_schedule(STRIDED[4], numel, itemsize, geometry)
    ends = [0, *(launch.stop for launch in schedule.launches)]
    assert [launch.start for launch in schedule.launches] == ends[:-1]
    assert ends[-1] == numel
    offsets = [launch.offset for launch in schedule.launches] + [schedule.advance]
    for launch, after in zip(schedule.launches, offsets[1:], strict=True):
        size = launch.stop - launch.start
        assert fits_32_bits(size, itemsize)
        assert after - launch.offset == advance_of_strides(size, 4, geometry)
    whole = advance_of_strides(numel, 4, geometry)
    assert schedule.launches[0].offset == (0 if len(schedule.launches) == 1 else whole)


@pytest.mark.parametrize("name", ACCESS_PATTERNS)
@given(data=st.data())
def test_no_two_elements_share_words(name, data):
    access = ACCESS_PATTERNS[name]
    numel = data.draw(st.integers(1, 2**31 - 1))
    if access.vector:
        numel = -(-numel // access.vector) * access.vector
    geometry = data.draw(st.sampled_from([Geometry.H100, Geometry.L4, SMALL]))
    launch = launch_schedule(access, numel, 1, geometry).launches[0]
    draw = data.draw(st.integers(0, launch.stop - 1))
    place = launch.word_source(draw)
    assert 0 <= place.thread < launch.threads
    assert 0 <= place.lane < (access.unroll if not access.vector else 4)
    assert element_at(launch, place) == draw
    # The advance covers all calls of a thread, except for dropout whose vectors are not 4.
    schedule = launch_schedule(access, numel, 1, geometry)
    if access.vector in (0, 4):
        assert launch.offset + 4 * (place.call + 1) <= schedule.advance


def element_at(launch: Launch, place: WordSource) -> int:
    """The inverse of Launch.word_source."""
    access = launch.access
    if not access.vector:
        stride = place.call * access.unroll + place.lane
        return launch.start + stride * launch.threads + place.thread
    turn, part = divmod(place.call, -(-access.vector // 4))
    group = turn * launch.threads + place.thread
    return launch.start + group * access.vector + part * 4 + place.lane


def test_the_first_half_of_a_split_is_the_smaller_one():
    parts = list(split_32_bits(2**29 + 3, 4))
    assert parts == [(0, 2**28 + 1), (2**28 + 1, 2**29 + 3)]


def test_an_empty_tensor_draws_nothing():
    for access in ACCESS_PATTERNS.values():
        schedule = launch_schedule(access, 0, 4, Geometry.H100)
        assert schedule.launches == ()
        assert schedule.advance == 0


def test_more_probabilities_than_torch_can_count_raise():
    assert launch_schedule(QUADS, 2**32 - 2048, 4, Geometry.H100).advance == 12
    with pytest.raises(ValueError, match="expected at most"):
        launch_schedule(QUADS, 2**32 - 2047, 4, Geometry.H100)
