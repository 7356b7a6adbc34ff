"""The emulator backend: CPU tensors with the numbers of a GPU."""

from dist_rng.emulation.backend import fill

__all__ = ["fill"]
