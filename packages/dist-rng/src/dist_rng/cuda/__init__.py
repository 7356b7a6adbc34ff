"""The CUDA backend: the Philox stream of one GPU, drawn where a local tensor needs it."""

from dist_rng.cuda.backend import available, fill

__all__ = ["available", "fill"]
