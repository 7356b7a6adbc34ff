"""Philox4x32, and the order in which torch's CUDA kernels take its words: pure Python.

Note [words of this module]
    call: one evaluation of Philox, by one thread; it gives four 32-bit words.
    lane: which of a call's words, or pairs of words, an element takes.
    offset: the CUDA generator's count of words per thread, a multiple of 4; a call moves it by 4.
    launch: one kernel; it draws a range of the global tensor's draw indices.
    reach: a launch in which each thread strides over the tensor (``unroll``), or one in which it
        takes ``vector`` neighbours at a time (fused dropout, Bernoulli of a tensor).

The C++ and CUDA code is ``src/cpp/philox.h`` and ``philox_map.h``; this is what they are tested
against. Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), and
aten/src/ATen/native/cuda/{DistributionTemplates.h,Dropout.cu}.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dist_rng.geometry import POLICIES, Geometry, LaunchPolicy

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LARGEST_INT32 = 2**31 - 1
WORDS_PER_CALL = 4

Words = tuple[int, ...]  # four of a counter or a call, two of a key


@dataclass(frozen=True)
class Reach:
    """How a kernel's threads reach its elements.

    Attributes:
        unroll: elements that a thread takes from one call, one in each stride; 4 or 2.
        vector: 0, or the neighbours that a thread takes at a time: 8, 4 or 2.
        capped: whether the threads are limited to what the device holds.
        splits: whether tensors beyond 32-bit offsets are drawn in several launches.
        advance: words by which the offset moves whatever the size, or None.
    """

    unroll: int
    vector: int = 0
    capped: bool = True
    splits: bool = True
    advance: int | None = None


STRIDED = {unroll: Reach(unroll) for unroll in (2, 4)}
# bernoulli_tensor_cuda_kernel: CUDA_tensor_apply2 with a step of 4, one call per thread. It
# reserves 10 words, which philox_cuda_state rounds up to 12.
QUADS = Reach(unroll=4, vector=4, capped=False, splits=False, advance=12)


def dropout_reach(numel: int, input_itemsize: int) -> Reach:
    """Return how ``native_dropout`` reaches a dense tensor of ``numel`` elements.

    It takes 16 bytes at a time, or the largest power of two of elements that divides the
    tensor. The tensor is assumed to be aligned to 16 bytes, as torch's allocator does.
    """
    vector = 16 // input_itemsize
    while vector > 1 and numel % vector:
        vector //= 2
    return Reach(unroll=4, vector=vector if vector > 1 else 0, splits=False)


@dataclass(frozen=True)
class Place:
    """Where an element's random words come from; see the note."""

    thread: int
    call: int
    lane: int


@dataclass(frozen=True)
class Launch:
    """One kernel.

    Attributes:
        start: the first draw index.
        stop: one past the last.
        threads: threads of the launch.
        offset: the generator's offset at this launch, counted from its value before the draw.
        reach: how the threads reach the elements.
    """

    start: int
    stop: int
    threads: int
    offset: int
    reach: Reach

    def place(self, draw: int) -> Place:
        """Return where the element of draw index ``draw`` finds its words."""
        index = draw - self.start
        vector = self.reach.vector
        if vector:
            group, element = divmod(index, vector)
            turn, thread = divmod(group, self.threads)
            calls = -(-vector // WORDS_PER_CALL)
            return Place(thread, turn * calls + element // WORDS_PER_CALL, element % WORDS_PER_CALL)
        stride, thread = divmod(index, self.threads)
        call, lane = divmod(stride, self.reach.unroll)
        return Place(thread, call, lane)


@dataclass(frozen=True)
class Schedule:
    """All launches of one draw, and by how much the generator's offset moves over it."""

    launches: tuple[Launch, ...]
    advance: int

    def launch_of(self, draw: int) -> Launch:
        """Return the launch that draws the element of draw index ``draw``."""
        return next(launch for launch in self.launches if launch.start <= draw < launch.stop)


def schedule(
    reach: Reach,
    numel: int,
    itemsize: int,
    geometry: Geometry,
    policy: LaunchPolicy = POLICIES[-1],
) -> Schedule:
    """Return the launches with which one device of ``geometry`` draws a dense tensor.

    Args:
        reach: of the kernel that draws.
        numel: elements of the whole tensor; nothing is drawn for 0.
        itemsize: bytes per element of the tensor that is written.
        geometry: the device.
        policy: that of the torch release which is reproduced.

    Raises:
        ValueError: torch's own kernel cannot draw so many elements.
    """
    if numel == 0:
        return Schedule((), 0)
    if not reach.capped:
        # Its thread's index is 32-bit arithmetic: beyond, elements are drawn twice, or never.
        if numel > 2**32 - 2048:
            raise ValueError(
                f"torch.bernoulli of {numel} probabilities: torch's CUDA kernel counts elements in"
                " 32 bits and has no defined result beyond 2**32 - 2048; draw it in parts"
            )
        assert reach.advance is not None
        threads = -(-numel // reach.vector)
        return Schedule((Launch(0, numel, threads, 0, reach),), reach.advance)
    parts = [(0, numel)]
    offset = 0
    if reach.splits and not fits_32_bits(numel, itemsize):
        # TensorIterator cuts the tensor, but the whole has made its reservation before.
        offset = _reservation(reach, numel, geometry, policy)
        parts = list(split_32_bits(numel, itemsize))
    launches = []
    for start, stop in parts:
        threads = geometry.threads(stop - start, reach.unroll, policy)
        launches.append(Launch(start, stop, threads, offset, reach))
        offset += _reservation(reach, stop - start, geometry, policy)
    return Schedule(tuple(launches), offset)


def fits_32_bits(numel: int, itemsize: int) -> bool:
    """Return TensorIterator's ``can_use_32bit_indexing`` for a dense tensor."""
    return numel <= _LARGEST_INT32 and 1 + (numel - 1) * itemsize <= _LARGEST_INT32


def split_32_bits(numel: int, itemsize: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the parts in which TensorIterator draws a large dense tensor, in its order.

    It halves the dim of the largest extent; dense tensors are one dim to it. The first half is
    the smaller one.
    """
    if fits_32_bits(numel, itemsize):
        yield start, start + numel
        return
    half = numel // 2
    yield from split_32_bits(half, itemsize, start)
    yield from split_32_bits(numel - half, itemsize, start + half)


def words(seed: int, offset: int, place: Place) -> Words:
    """Return the four words of a call of cuRAND's ``curandStatePhilox4_32_10_t``.

    Args:
        seed: the generator's, 64 bits.
        offset: the generator's at this launch; a multiple of 4.
        place: the thread and the call; the lane has no say.
    """
    count = offset // WORDS_PER_CALL + place.call
    counter = (count & _MASK, count >> 32 & _MASK, place.thread & _MASK, place.thread >> 32)
    return philox4x32(counter, (seed & _MASK, seed >> 32))


def philox4x32(counter: Words, key: Words, rounds: int = 10) -> Words:
    """Return Philox4x32 of a counter: 10 rounds in cuRAND, 7 in flash attention."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & _MASK,
            (first >> 32) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _reservation(reach: Reach, numel: int, geometry: Geometry, policy: LaunchPolicy) -> int:
    # Fused dropout reserves as if a call served four strides, whatever its vector: with vectors
    # of 8 or 2 the next draw repeats some of its words, and so it does here.
    threads = geometry.threads(numel, reach.unroll, policy)
    return WORDS_PER_CALL * -(-numel // (threads * reach.unroll))
