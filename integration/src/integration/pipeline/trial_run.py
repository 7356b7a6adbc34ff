"""Runs each stage of a pipeline once, to find what it takes, returns and draws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from integration.device import Device
from integration.pipeline.stage import stage_output


@dataclass(frozen=True)
class TensorInfo:
    """The shape and dtype of a tensor on one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> Tensor:
        """Returns a tensor of zeros."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def on_meta(self) -> Tensor:
        """Returns a tensor without values; one of floats requires a gradient, as those sent do."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return tensor.requires_grad_(tensor.is_floating_point())


@dataclass(frozen=True)
class StageRun:
    """What a stage does with one microbatch.

    Attributes:
        inputs: what it takes from the previous stage, or from the batch.
        outputs: what it returns.
        words: how many words of the stream of random numbers it draws.
    """

    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    words: int


def trial_runs(
    parts: Mapping[int, nn.Module],
    owners: Sequence[int],
    inputs: Sequence[Tensor],
    keywords: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    device: Device,
    *,
    count_words: bool,
) -> list[StageRun]:
    """Runs each stage once, without gradients; all ranks of the pipeline call it.

    Generators keep their states.

    Args:
        parts: this rank's stages, by index.
        owners: rank in ``group`` of each stage.
        inputs: of the first stage, of one microbatch, the same on all ranks.
        keywords: see `ModelFamily.keywords`, of one microbatch.
        group: ranks of the pipeline.
        device: of this rank.
        count_words: whether to count the words that stages draw, by dist-rng.

    Returns:
        for each stage, what it takes, returns and draws on the ranks of this pipeline.
    """
    found: list[StageRun] = []
    taken, states = _describe(tuple(inputs)), device.random_state()
    for index, owner in enumerate(owners):
        message: list[StageRun | None] = [None]
        if index in parts:
            tensors = inputs if index == 0 else [each.zeros(device.current) for each in taken]
            before = device.generator.get_state()
            with torch.no_grad():
                output = parts[index](*tensors, **keywords)
            words = _words_since(before, device.generator) if count_words else 0
            output = stage_output(output, last=index == len(owners) - 1)
            outputs = _describe(output if isinstance(output, tuple) else (output,))
            message = [StageRun(taken, outputs, words)]
        dist.broadcast_object_list(message, group=group, group_src=owner)
        run = message[0]
        assert run is not None
        found.append(run)
        taken = run.outputs
    device.set_random_state(states)
    return found


def _words_since(before: Tensor, generator: torch.Generator) -> int:
    from dist_rng import words_between  # on use, as other runs need only torch

    return words_between(before, generator.get_state())


def _describe(tensors: tuple[Tensor, ...]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
