"""The interface of training data, and the loader of microbatches.

Global batches do not depend on the data-parallel degree.

Note [one stream of samples]
    Sample ``g`` of the run is the sample ``permutation(epoch)[slot]`` of the data, with
    ``epoch, slot = divmod(g, len(data))``, and step ``s`` trains on samples
    ``[s * global_batch, (s + 1) * global_batch)``. Microbatch ``m`` of data-parallel rank ``r`` is
    the rows ``[(m * degree + r) * micro_batch, (m * degree + r + 1) * micro_batch)`` of the step's
    batch. The rows of the ranks are disjoint, and together they are the same batch at every degree
    and after a resume.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from integration.device import CPU, Device
from integration.errors import UsageError

# Tensors by name, of one sample, or of a microbatch with a first dim of samples.
Batch = dict[str, Tensor]


class Samples(Protocol):
    """A finite, ordered collection of samples.

    Attributes:
        source: description for reports.
        size: size in bytes, for reports.
        fingerprint: SHA-256 of the content; a checkpoint resumes on the same content only.
        tokenizer: SHA-256 of the tokenizer of text; None: a token is a byte, or there is no text.
        tokens: tokens of a sample.
    """

    source: str
    size: int
    fingerprint: str
    tokenizer: str | None
    tokens: int

    def __len__(self) -> int:
        """Number of samples of an epoch."""

    def sample(self, slot: int, draw: int) -> Batch:
        """Returns the sample at ``slot``, the run's sample number ``draw``.

        Random values of a sample depend on ``draw`` only, so that they are the same at every
        data-parallel degree and after a resume.
        """

    def require(self, samples: int) -> None:
        """Refuses a global batch of more samples than there are.

        Raises:
            UsageError: names both numbers.
        """


@dataclass(frozen=True)
class BatchPlan:
    """The sizes of a step, in samples: global_batch = micro_batch x accumulation x degree."""

    global_batch: int
    micro_batch: int
    degree: int

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            UsageError: a size is below one, or the sizes do not divide the global batch.
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
        """Returns the plan of a loader that yields the microbatches of all ranks, concatenated.

        Rows ``[r * micro_batch, ...)`` of its microbatch ``m`` are microbatch ``m`` of rank ``r``.
        """
        return BatchPlan(self.global_batch, self.micro_batch * self.degree, 1)


# Each seed has its own range of epochs, so that permutations of different seeds differ.
EPOCHS_PER_SEED = 2**20


class BatchLoader(Iterator[list[Batch]]):
    """Yields a rank's microbatches, step after step, without end.

    Each item is a list of ``plan.accumulation`` batches: dicts of the tensors of a sample, stacked
    along a first dim of ``micro_batch``. The only state is the number of steps consumed.

    Args:
        data: the samples.
        plan: the sizes of a step.
        rank: data-parallel rank, below ``plan.degree``.
        seed: seed of the permutation of each epoch.
        device: of the batches; they are copied to an accelerator from pinned memory, which the host
            does not wait for.
        on_host: names of tensors that stay on the host.

    Raises:
        UsageError: the data has fewer samples than one global batch needs.
    """

    def __init__(
        self,
        data: Samples,
        plan: BatchPlan,
        *,
        rank: int,
        seed: int,
        device: Device = CPU,
        on_host: Collection[str] = (),
    ) -> None:
        if not 0 <= rank < plan.degree:
            raise ValueError(f"data-parallel rank {rank} is outside the degree {plan.degree}")
        data.require(plan.global_batch)
        self._data = data
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._device, self._on_host = device, on_host
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)  # (samples,) of the current epoch
        self.step = 0

    def __next__(self) -> list[Batch]:
        """Returns the microbatches of the next step and moves on."""
        plan = self._plan
        start = self.step * plan.global_batch
        batches = [
            self._on_device([self._sample(start + row) for row in self._rows(microbatch)])
            for microbatch in range(plan.accumulation)
        ]
        self.step += 1
        return batches

    def state_dict(self) -> dict[str, int]:
        """Returns the position in the stream: valid at every data-parallel degree."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from a position that ``state_dict`` returned."""
        self.step = state["step"]

    def _on_device(self, samples: Sequence[Batch]) -> Batch:
        batch = _stack(samples)
        if not self._device.is_accelerator:
            return batch
        device = self._device.current
        return {
            name: tensor
            if name in self._on_host
            else tensor.pin_memory().to(device, non_blocking=True)
            for name, tensor in batch.items()
        }

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
