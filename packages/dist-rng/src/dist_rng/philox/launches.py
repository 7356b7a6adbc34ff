"""The launches of torch's CUDA kernels, and the order in which they use the words of Philox.

Note [Philox terminology]
    call: one evaluation of Philox by one thread, which returns four 32-bit words.
    lane: the index of a word, or of a pair of words, among those of a call.
    offset: the CUDA generator's count of words per thread, a multiple of 4; a call adds 4.
    launch: one kernel, which draws a range of the global tensor's draw indices.
    access pattern: whether each thread of a launch strides over the tensor (``unroll``), or draws
        ``vector`` neighbours at a time (fused dropout, Bernoulli of a tensor).

The counterpart in C++ and CUDA is ``src/cpp/philox/launch.h``, which is tested against this module.
Source: aten/src/ATen/native/cuda/{DistributionTemplates.h,Dropout.cu}.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dist_rng.philox.geometry import POLICIES, Geometry, LaunchPolicy

_LARGEST_INT32 = 2**31 - 1
WORDS_PER_CALL = 4


@dataclass(frozen=True)
class AccessPattern:
    """How a kernel's threads access its elements.

    Attributes:
        unroll: elements that a thread draws from one call, one in each stride; 4 or 2.
        vector: 0, or the number of neighbours that a thread draws at a time: 8, 4 or 2.
        capped: whether the grid is limited to the resident blocks of the device.
        splits: whether tensors beyond 32-bit offsets are drawn in several launches.
        advance: words by which the offset advances for every size, or None if it depends on it.
    """

    unroll: int
    vector: int = 0
    capped: bool = True
    splits: bool = True
    advance: int | None = None


STRIDED = {unroll: AccessPattern(unroll) for unroll in (2, 4)}
# bernoulli_tensor_cuda_kernel: CUDA_tensor_apply2 with a step of 4, one call per thread. It
# reserves 10 words, which philox_cuda_state rounds up to 12.
QUADS = AccessPattern(unroll=4, vector=4, capped=False, splits=False, advance=12)


def dropout_access(numel: int, input_itemsize: int) -> AccessPattern:
    """Returns how ``native_dropout`` accesses a dense tensor of ``numel`` elements.

    A thread draws 16 bytes of elements at a time, or the largest smaller power of two of elements
    that divides ``numel``. The tensor is assumed to be aligned to 16 bytes, as torch allocates it.
    """
    vector = 16 // input_itemsize
    while vector > 1 and numel % vector:
        vector //= 2
    return AccessPattern(unroll=4, vector=vector if vector > 1 else 0, splits=False)


@dataclass(frozen=True)
class WordSource:
    """Where an element's random words come from."""

    thread: int
    call: int
    lane: int


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        start: the first draw index.
        stop: one past the last draw index.
        threads: number of threads.
        offset: the generator's offset at this launch relative to its value before the draw.
        access: how the threads access the elements.
    """

    start: int
    stop: int
    threads: int
    offset: int
    access: AccessPattern

    def word_source(self, draw: int) -> WordSource:
        """Returns where the words of the element of draw index ``draw`` come from."""
        index = draw - self.start
        vector = self.access.vector
        if vector:
            group, element = divmod(index, vector)
            turn, thread = divmod(group, self.threads)
            calls = -(-vector // WORDS_PER_CALL)
            return WordSource(
                thread, turn * calls + element // WORDS_PER_CALL, element % WORDS_PER_CALL
            )
        stride, thread = divmod(index, self.threads)
        call, lane = divmod(stride, self.access.unroll)
        return WordSource(thread, call, lane)


@dataclass(frozen=True)
class LaunchSchedule:
    """All launches of one draw, and the words by which it advances the generator's offset."""

    launches: tuple[Launch, ...]
    advance: int

    def launch_of(self, draw: int) -> Launch:
        """Returns the launch that draws the element of draw index ``draw``."""
        return next(launch for launch in self.launches if launch.start <= draw < launch.stop)


def launch_schedule(
    access: AccessPattern,
    numel: int,
    itemsize: int,
    geometry: Geometry,
    policy: LaunchPolicy = POLICIES[-1],
) -> LaunchSchedule:
    """Returns the launches with which one device of ``geometry`` draws a dense tensor.

    Args:
        access: the access pattern of the kernel.
        numel: number of elements of the global tensor; nothing is drawn for 0.
        itemsize: bytes per element of the tensor that is written.
        geometry: the device.
        policy: the launch policy of the torch release that is reproduced.

    Raises:
        ValueError: torch's kernel cannot draw so many elements.
    """
    if numel == 0:
        return LaunchSchedule((), 0)
    if not access.capped:
        # The kernel's thread index is 32 bits: beyond them elements are drawn twice, or never.
        if numel > 2**32 - 2048:
            raise ValueError(
                "torch.bernoulli: expected at most 2**32 - 2048 probabilities, beyond which the"
                f" result of torch's CUDA kernel is undefined, got {numel}; draw them in parts"
            )
        assert access.advance is not None
        threads = -(-numel // access.vector)
        return LaunchSchedule((Launch(0, numel, threads, 0, access),), access.advance)
    parts = [(0, numel)]
    offset = 0
    if access.splits and not fits_32_bits(numel, itemsize):
        # TensorIterator splits the tensor after the offset was advanced for all of it.
        offset = _offset_increment(access, numel, geometry, policy)
        parts = list(split_32_bits(numel, itemsize))
    launches = []
    for start, stop in parts:
        threads = geometry.threads(stop - start, access.unroll, policy)
        launches.append(Launch(start, stop, threads, offset, access))
        offset += _offset_increment(access, stop - start, geometry, policy)
    return LaunchSchedule(tuple(launches), offset)


def fits_32_bits(numel: int, itemsize: int) -> bool:
    """Returns TensorIterator's ``can_use_32bit_indexing`` for a dense tensor."""
    return numel <= _LARGEST_INT32 and 1 + (numel - 1) * itemsize <= _LARGEST_INT32


def split_32_bits(numel: int, itemsize: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yields the parts in which TensorIterator draws a large dense tensor, in its order.

    It halves the dim of the largest extent, and collapses a dense tensor to one dim. The first half
    is the smaller one.
    """
    if fits_32_bits(numel, itemsize):
        yield start, start + numel
        return
    half = numel // 2
    yield from split_32_bits(half, itemsize, start)
    yield from split_32_bits(numel - half, itemsize, start + half)


def _offset_increment(
    access: AccessPattern, numel: int, geometry: Geometry, policy: LaunchPolicy
) -> int:
    # Fused dropout advances the offset as if a call drew four strides, whatever its vector: with
    # vectors of 8 or 2 torch's next draw repeats some of its words, and so does this package's.
    threads = geometry.threads(numel, access.unroll, policy)
    return WORDS_PER_CALL * -(-numel // (threads * access.unroll))
