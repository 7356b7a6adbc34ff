"""Stores a CUDA generator's offset inside the state of a CPU generator.

Note [unused bits]
    An emulated CUDA generator has a seed and an offset. The seed is the CPU generator's. The
    offset must be reset by ``torch.manual_seed``, also with the same seed, and must be part of what
    ``torch.get_rng_state`` returns and ``set_rng_state`` sets, which activation checkpointing and
    ``fork_rng`` use; but CPU draws must not change. So it is written into the state itself.
    MT19937 has 19937 bits of state in 624 * 32 = 19968: the low 31 bits of word 0 are not used by
    any later word, and torch has already drawn word 0 of every block in a state. Their original
    value follows from the other words, so the stored value is the difference from it. It is
    ``offset / 4 + 1``.

    When CPU draws reach the next block the stored value is lost, which is why EmulatedGenerators
    remembers the offset too.
"""

import ctypes

import torch

_BYTES = 5056  # of torch.Generator("cpu").get_state(), laid out in src/cpp/mt19937/mt19937.h
_WORDS = 3  # index of the first of the 624 words, in units of 8 bytes
_LOW_31 = 0x7FFFFFFF
_TWIST = 0x9908B0DF
LARGEST_OFFSET = 4 * (_LOW_31 - 1)


def read_offset(state: torch.Tensor) -> int | None:
    """Returns the offset that is stored in a CPU generator's state.

    Args:
        state: what ``torch.Generator.get_state`` returned.

    Returns:
        The offset; 0 if the generator has drawn nothing since it was seeded, and None if no offset
        is stored.
    """
    fields = _fields(state)
    stored = (fields[_WORDS] ^ _original_low_bits(fields)) & _LOW_31
    if stored:
        return int(4 * (stored - 1))
    return 0 if _is_fresh(fields) else None


def write_offset(state: torch.Tensor, offset: int | None) -> None:
    """Stores an offset in a CPU generator's state, or removes it with None.

    Raises:
        OverflowError: the offset is too large, after some 2**31 draws.
    """
    if offset is not None and not 0 <= offset <= LARGEST_OFFSET:
        raise OverflowError(
            f"emulated CUDA generator: expected an offset of at most {LARGEST_OFFSET}, got"
            f" {offset}; seed it again"
        )
    stored = 0 if offset is None else offset // 4 + 1
    fields = _fields(state)
    fields[_WORDS] = fields[_WORDS] & ~_LOW_31 | (_original_low_bits(fields) ^ stored) & _LOW_31


def _fields(state: torch.Tensor) -> "ctypes.Array[ctypes.c_uint64]":
    if state.numel() != _BYTES or state.dtype != torch.uint8 or state.device.type != "cpu":
        raise ValueError(
            f"expected the {_BYTES} bytes of a CPU generator's state, got {state.numel()} elements"
            f" of {state.dtype} on {state.device}"
        )
    return (ctypes.c_uint64 * (_BYTES // 8)).from_address(state.data_ptr())


def _is_fresh(fields: "ctypes.Array[ctypes.c_uint64]") -> bool:
    left, drawn = fields[1] & 0xFFFFFFFF, fields[2]
    return bool(left == 1 and drawn == 0)


def _original_low_bits(fields: "ctypes.Array[ctypes.c_uint64]") -> int:
    """Returns the low 31 bits that word 0 has where no offset is stored."""
    if _is_fresh(fields):
        return fields[0] & _LOW_31  # the first word of a seeded state is the seed
    # Word 623 of the block is word 396 xor the twist of (an older word's top bit, word 0).
    twisted = fields[_WORDS + 623] ^ fields[_WORDS + 396]
    lowest = twisted >> 31 & 1
    if lowest:
        twisted ^= _TWIST
    return (twisted << 1 | lowest) & _LOW_31
