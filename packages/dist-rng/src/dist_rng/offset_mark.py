"""A CUDA generator's offset, kept inside the state of a CPU generator.

Note [dead bits]
    An emulated CUDA generator has a seed and an offset. The seed is the CPU generator's. The
    offset must be reset by ``torch.manual_seed``, also with the same seed, and must travel with
    ``torch.get_rng_state`` and ``set_rng_state``, which activation checkpointing and ``fork_rng``
    use; yet CPU draws must go on as if nothing were there. So it is written into the state itself.
    MT19937 has 19937 bits of state in 624 * 32 = 19968: the low 31 bits of word 0 feed no later
    word, and torch has drawn word 0 of every block that it shows. What the word would be without
    a mark follows from the others, so the mark is the difference. It is ``offset / 4 + 1``.

    When CPU draws move on to the next block the mark is lost, which is why EmulatedGenerators
    remembers it too.
"""

import ctypes

import torch

_BYTES = 5056  # of torch.Generator("cpu").get_state(); src/cpp/torch_state.h has its layout
_WORDS = 3  # where the 624 words begin, in units of 8 bytes
_LOW_31 = 0x7FFFFFFF
_TWIST = 0x9908B0DF
LARGEST_OFFSET = 4 * (_LOW_31 - 1)


def read_mark(state: torch.Tensor) -> int | None:
    """Return the offset that a CPU generator's state carries.

    Args:
        state: what ``torch.Generator.get_state`` returned.

    Returns:
        0 also where the generator has drawn nothing since it was seeded; None where nothing is
        known.
    """
    fields = _fields(state)
    mark = (fields[_WORDS] ^ _unmarked(fields)) & _LOW_31
    if mark:
        return int(4 * (mark - 1))
    return 0 if _is_fresh(fields) else None


def write_mark(state: torch.Tensor, offset: int | None) -> None:
    """Write an offset into a CPU generator's state, or take it out with None.

    Raises:
        OverflowError: the offset is too large, after some 2**31 draws.
    """
    if offset is not None and not 0 <= offset <= LARGEST_OFFSET:
        raise OverflowError(f"emulated CUDA generator: offset {offset} is above {LARGEST_OFFSET}")
    mark = 0 if offset is None else offset // 4 + 1
    fields = _fields(state)
    fields[_WORDS] = fields[_WORDS] & ~_LOW_31 | (_unmarked(fields) ^ mark) & _LOW_31


def _fields(state: torch.Tensor) -> "ctypes.Array[ctypes.c_uint64]":
    if state.numel() != _BYTES or state.dtype != torch.uint8 or state.device.type != "cpu":
        raise ValueError(f"a CPU generator's state has {_BYTES} bytes, not {state.numel()}")
    return (ctypes.c_uint64 * (_BYTES // 8)).from_address(state.data_ptr())


def _is_fresh(fields: "ctypes.Array[ctypes.c_uint64]") -> bool:
    left, drawn = fields[1] & 0xFFFFFFFF, fields[2]
    return bool(left == 1 and drawn == 0)


def _unmarked(fields: "ctypes.Array[ctypes.c_uint64]") -> int:
    """Return the low 31 bits that word 0 has of itself."""
    if _is_fresh(fields):
        return fields[0] & _LOW_31  # seeding begins with the seed itself
    # The block's last word is word 396 xor the twist of (an older word's top bit, word 0).
    twisted = fields[_WORDS + 623] ^ fields[_WORDS + 396]
    lowest = twisted >> 31 & 1
    if lowest:
        twisted ^= _TWIST
    return (twisted << 1 | lowest) & _LOW_31
