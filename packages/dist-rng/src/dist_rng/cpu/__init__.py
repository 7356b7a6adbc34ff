"""The CPU backend: the mt19937 stream of one CPU, drawn where a local tensor needs it."""

from dist_rng.cpu.backend import fill

__all__ = ["fill"]
