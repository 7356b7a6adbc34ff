"""Gives each stage, for each microbatch, the random numbers that one device would draw there.

One device runs the microbatches one after another, and each through all stages. So before a stage
runs a microbatch, its generator is advanced by what one device has drawn until then: all stages for
the earlier microbatches, and the earlier stages for this one. The numbers of a step are those of
one device with microbatches of this size.
"""

from collections.abc import Sequence

import torch


class StageRandom:
    """The positions of a rank's stages in one device's stream of random numbers.

    Args:
        generator: that this rank's stages draw from; all ranks have it in the same state.
        words: how many words of the stream each stage draws for one microbatch
            (`dist_rng.words_between`).
    """

    def __init__(self, generator: torch.Generator, words: Sequence[int]) -> None:
        self._generator = generator
        self._before = [sum(words[:stage]) for stage in range(len(words))]
        self._total = sum(words)
        self._start = generator.get_state()

    def begin(self) -> None:
        """Takes the generator's state as that before the first microbatch."""
        if self._total:
            self._start = self._generator.get_state()

    def enter(self, stage: int, microbatch: int) -> None:
        """Puts the generator where one device's is before a stage runs a microbatch."""
        self._move(microbatch * self._total + self._before[stage])

    def end(self, microbatches: int) -> None:
        """Puts the generator where one device's is after all microbatches."""
        self._move(microbatches * self._total)

    def _move(self, words: int) -> None:
        if self._total:
            from dist_rng import skip  # on use, as other runs need only torch

            self._generator.set_state(self._start)
            skip(words, self._generator)
