"""The position of a generator in its stream: distances between two positions, and skips.

Note [units]
    A *word* is one step of torch's engine, by which every random operator advances a generator. On
    a CPU it is one 32-bit draw of mt19937, on a GPU (and where one is emulated) one unit of the
    Philox offset, which torch advances by multiples of 4. ``skip(words_between(a, b))`` leads a
    generator from state ``a`` exactly to state ``b``; where it would not, an error is raised.
"""

import operator
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_rng import _core
from dist_rng.cuda.backend import reserve
from dist_rng.emulation.device import active_device, is_active
from dist_rng.emulation.stored_offset import LARGEST_OFFSET, read_offset

_CUDA_STATE = struct.Struct("<Qq")  # seed and offset; ATen/cuda/CUDAGeneratorImpl.cpp
_CPU_SEED = struct.Struct("<Q")
# normal_x, normal_y, normal_rho, whether normal_y is valid, and the sample of floats: TorchState in
# src/cpp/mt19937/mt19937.h.
_CPU_SAMPLES = slice(24 + 8 * 624, None)


def words_between(before: Tensor, after: Tensor, *, limit: int = 2**32) -> int:
    """Returns how many words lead from one state of a generator to a later one.

    On a CPU the words are counted by making them, some 0.1 ns each. A state has no number of draws.

    Args:
        before: what ``Generator.get_state()`` (or ``torch.get_rng_state()``) returned: uint8, 5056
            elements of a CPU generator or 16 of a CUDA generator.
        after: a later state of the same generator, or of one with the same seed.
        limit: the largest number of words that is expected.

    Returns:
        The number of words, from 0 to ``limit``.

    Raises:
        TypeError: ``limit`` is not an integer.
        ValueError: the states are not those of one kind of generator, or have different seeds;
            ``after`` is not reached within ``limit`` words; or only one of them has the sample
            that ``normal_`` of fewer than 16 elements keeps for the next call (or they have
            different ones), which no number of words describes.
    """
    limit = operator.index(limit)
    first, last = _state_of(before, "before"), _state_of(after, "after")
    if first.kind != last.kind:
        raise ValueError(
            f"words_between: expected two states of one kind of generator, got a {first.kind}"
            f" generator's and a {last.kind} generator's; take both from the same generator"
        )
    if first.seed != last.seed:
        raise ValueError(
            f"words_between: expected two states of one seed, got the seeds {first.seed} and"
            f" {last.seed}; take both after the last manual_seed"
        )
    if first.samples != last.samples:
        raise ValueError(
            "words_between: expected states with the same cached sample of normal_, or both"
            " without one, got others; normal_ of an odd number of elements below 16 caches one,"
            " or uses it up, which a number of words does not describe: draw an even number, or 16"
            " elements and more"
        )
    if first.offset is not None and last.offset is not None:
        words = last.offset - first.offset
        reached = 0 <= words <= limit
    else:
        counted = _core.words_between(before.data_ptr(), after.data_ptr(), limit)
        words, reached = counted or 0, counted is not None
    if not reached:
        raise ValueError(
            f"words_between: expected a state that is at most {limit} words after the other, got"
            " one that is not reached by then; pass the earlier state first, or a larger limit"
        )
    return words


def skip(words: int, generator: torch.Generator | None = None) -> None:
    """Advances a generator by as many words without drawing them.

    The sample that ``normal_`` has cached on a CPU stays, as it does when other operators draw.

    Args:
        words: at least 0; of a CUDA generator, a multiple of 4.
        generator: a CPU or CUDA generator; None for torch's default one of CPUs. Where a GPU is
            emulated, a CPU generator's words are those of the GPU.

    Raises:
        TypeError: ``words`` is not an integer.
        ValueError: ``words`` is out of range, or the generator is of another device.
        RuntimeError: a CUDA graph is being captured, and this torch is older than 2.14.
    """
    words = operator.index(words)
    generator = torch.default_generator if generator is None else generator
    device = generator.device.type
    if device not in ("cpu", "cuda"):
        raise ValueError(
            f"skip: expected a CPU or CUDA generator, got one on {generator.device}, whose engine"
            " is unknown; use set_state with a state that was taken there"
        )
    counts_offset = device == "cuda" or is_active()
    largest = LARGEST_OFFSET if is_active() else 2**63 - 1
    if not 0 <= words <= largest or (counts_offset and words % 4):
        of_four = ", a multiple of 4 by which GPUs advance" if counts_offset else ""
        raise ValueError(
            f"skip: expected from 0 to {largest} words{of_four}, got {words}; pass what"
            " words_between returned"
        )
    if device == "cuda":
        reserve(generator, words)
        return
    if emulated := active_device():
        offset = emulated.generators.position(generator).offset
        emulated.generators.set_offset(generator, offset + words)
        return
    state = generator.get_state()
    _core.skip(state.data_ptr(), words)
    generator.set_state(state)


@dataclass(frozen=True)
class _State:
    """What is compared of a generator's state.

    Attributes:
        kind: the kind of generator, for messages.
        seed: what ``manual_seed`` set.
        offset: of a CUDA generator, or of one that is emulated; None of a CPU generator.
        samples: bytes of the samples that a CPU's ``normal_`` has cached.
    """

    kind: str
    seed: int
    offset: int | None
    samples: bytes


def _state_of(state: Tensor, name: str) -> _State:
    is_bytes = state.dtype == torch.uint8 and state.device.type == "cpu" and state.is_contiguous()
    if not is_bytes or state.numel() not in (_core.STATE_BYTES, _CUDA_STATE.size):
        raise ValueError(
            f"words_between: expected as `{name}` the {_core.STATE_BYTES} bytes of a CPU"
            f" generator's state or the {_CUDA_STATE.size} of a CUDA generator's, got"
            f" {state.numel()} elements of {state.dtype} on {state.device}; pass what"
            " Generator.get_state() returned"
        )
    content = bytes(state.numpy())
    if state.numel() == _CUDA_STATE.size:
        seed, offset = _CUDA_STATE.unpack(content)
        return _State("CUDA", seed, offset, b"")
    (seed,) = _CPU_SEED.unpack_from(content)
    if not is_active():
        return _State("CPU", seed, None, content[_CPU_SAMPLES])
    emulated = read_offset(state)
    if emulated is None:
        raise ValueError(
            f"words_between: expected as `{name}` a state that contains the offset of the emulated"
            " GPU, got one after draws of the CPU; take it with torch.get_rng_state()"
        )
    return _State("emulated CUDA", seed, emulated, b"")
