"""Global batches that do not depend on how many ranks share them.

Note [one stream of samples]
    Sample ``g`` of the run is the one at ``permutation(epoch)[slot]`` of the data, with
    ``epoch, slot = divmod(g, len(data))``, and step ``s`` trains on samples
    ``[s * global_batch, (s + 1) * global_batch)``. Everything else is a cut of that stream:
    microbatch ``m`` of data-parallel rank ``r`` holds the rows ``[(m * degree + r) * micro, ...)``
    of the step's batch, so that the shards of the ranks are disjoint and together are the same
    batch at every degree, after a resume too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from integration.data.samples import Batch, Samples
from integration.errors import UsageError


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut: global_batch = micro_batch x accumulation x degree.

    All sizes count samples.
    """

    global_batch: int
    micro_batch: int
    degree: int

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            UsageError: a size is below one, or the batch cannot be cut as stated.
        """
        for name in ("global_batch", "micro_batch", "degree"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.global_batch % (self.micro_batch * self.degree):
            raise UsageError(
                f"global batch {self.global_batch} is not micro batch {self.micro_batch} x"
                f" accumulation x data-parallel degree {self.degree}; make it a multiple of"
                f" {self.micro_batch * self.degree}, or change --micro-batch or the number of ranks"
            )

    @property
    def accumulation(self) -> int:
        """Microbatches per rank and step."""
        return self.global_batch // (self.micro_batch * self.degree)

    def of_all_ranks(self) -> "BatchPlan":
        """Return the plan by which one loader yields the microbatches of all ranks, concatenated.

        Rows ``[r * micro_batch, ...)`` of its microbatch ``m`` are microbatch ``m`` of rank ``r``.
        """
        return BatchPlan(self.global_batch, self.micro_batch * self.degree, 1)


# Keeps the permutations of two seeds apart for as many epochs as anyone trains.
EPOCHS_PER_SEED = 2**20


class BatchLoader(Iterator[list[Batch]]):
    """Yields a rank's microbatches of one step after another, for ever.

    Each item is a list of ``plan.accumulation`` dicts of what a sample has, by name, each tensor
    with a first dim of ``micro_batch``. The only state is the number of steps consumed.

    Args:
        data: what samples are taken from.
        plan: how the global batch is cut.
        rank: this rank's place on the data-parallel axis, below ``plan.degree``.
        seed: orders the samples; one permutation per epoch.

    Raises:
        UsageError: the data has fewer samples than one global batch needs.
    """

    def __init__(self, data: Samples, plan: BatchPlan, *, rank: int, seed: int) -> None:
        if not 0 <= rank < plan.degree:
            raise ValueError(f"data-parallel rank {rank} is outside the degree {plan.degree}")
        data.require(plan.global_batch)
        self._data = data
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)  # (samples,) of the present epoch
        self.step = 0

    def __next__(self) -> list[Batch]:
        """Return the microbatches of the next step and move on."""
        plan = self._plan
        start = self.step * plan.global_batch
        batches = [
            _stack([self._sample(start + row) for row in self._rows(microbatch)])
            for microbatch in range(plan.accumulation)
        ]
        self.step += 1
        return batches

    def state_dict(self) -> dict[str, int]:
        """Return the position in the stream: valid at every data-parallel degree."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position that ``state_dict`` returned."""
        self.step = state["step"]

    def _rows(self, microbatch: int) -> range:
        plan = self._plan
        first = (microbatch * plan.degree + self._rank) * plan.micro_batch
        return range(first, first + plan.micro_batch)

    def _sample(self, index: int) -> Batch:
        epoch, slot = divmod(index, len(self._data))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * EPOCHS_PER_SEED + epoch)
            self._order = torch.randperm(len(self._data), generator=generator)
            self._epoch = epoch
        return self._data.sample(int(self._order[slot]), index)


def _stack(samples: Sequence[Batch]) -> Batch:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
