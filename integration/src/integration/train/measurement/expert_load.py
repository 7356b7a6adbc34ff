"""Counts how many tokens chose each expert of a mixture, and were dropped, in a step's forwards."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from integration.models import RouterSize, routers_of


class ExpertLoad:
    """Hooks of a model's routers.

    Ranks that take the same tokens count them each, so shares of the sums over all ranks are those
    of the tokens.

    Args:
        model: parallelized, with all of its layers, or those of a rank's stages of a pipeline.
        sizes: of the routers of the full model, in order, by their paths there.
        device: of the counts.
        drops: whether to count choices with a weight of zero as well, which are dropped.

    Attributes:
        routers: those of ``model``, by their number in the full model.
    """

    def __init__(
        self,
        model: nn.Module,
        sizes: Mapping[str, RouterSize],
        device: torch.device | str,
        *,
        drops: bool = False,
    ) -> None:
        found, paths = routers_of(model), list(sizes)
        # Names of a part of a model are the full model's; wrappers of a full one may change them.
        numbers = range(len(paths)) if len(found) == len(paths) else map(paths.index, found)
        self.routers = dict(zip(numbers, found.values(), strict=True))
        self._choices = [size.choices for size in sizes.values()]
        experts = max((size.experts for size in sizes.values()), default=0)
        shape = (2 if drops else 1, len(paths), experts)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._counting = False
        for number, router in self.routers.items():
            router.register_forward_hook(self._hook(number))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Counts the forwards inside of it, which are those of a step."""
        self._counts.zero_()
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    @property
    def counts(self) -> Tensor:
        """The last step's choices of this rank, and the dropped ones if they are counted.

        (1 or 2, layers, experts), int64; without routers empty.
        """
        return self._counts

    def dropped(self, sums: Tensor, tokens: int) -> list[list[int]] | None:
        """Returns how many tokens each expert of a layer dropped; None if they are not counted.

        Args:
            sums: of `counts` over all ranks, of which several may have had the same tokens.
            tokens: of the step.
        """
        if len(sums) < 2 or not sums.numel():
            return None
        ranks = sums[0].sum(1) / torch.tensor(self._choices).to(sums) / tokens
        drops: list[list[int]] = (sums[1] / ranks.unsqueeze(1)).round().long().tolist()
        return drops

    def _hook(self, number: int) -> Any:
        def count(_: nn.Module, __: Any, output: Any) -> None:
            if not (self._counting and _is_training()):
                return
            chosen = _local(output[2])
            choices, *drops = self._counts[:, number]
            choices.scatter_add_(0, chosen, torch.ones_like(chosen))
            for one in drops:
                one.scatter_add_(0, chosen, (_local(output[1]) == 0).to(chosen.dtype))

        return count


def shares(counts: Tensor) -> list[list[float]] | None:
    """Returns the share of a layer's choices that each expert got.

    Args:
        counts: (layers, experts), sums over all ranks.
    """
    if not counts.numel():
        return None
    loads: list[list[float]] = (counts / counts.sum(1, keepdim=True)).tolist()
    return loads


def _local(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().flatten()


def _is_training() -> bool:
    """Returns whether a forward trains, and does not recompute, validate or find shapes."""
    # Of the package, which other runs do without.
    plan_api = sys.modules.get("plan_api")
    validates = plan_api is not None and plan_api.is_validating()
    # Backward, which recomputes layers, runs hooks again.
    in_backward = torch._C._current_graph_task_id() != -1
    return torch.is_grad_enabled() and not in_backward and not validates
