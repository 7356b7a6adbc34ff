"""Counts how many tokens chose each expert of a mixture, in the forwards of a step."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from integration.models import routers_of


class ExpertLoad:
    """Hooks of a model's routers.

    Ranks that take the same tokens count them each, so shares of the sums over all ranks are those
    of the tokens.

    Args:
        model: parallelized, with all of its layers, or those of a rank's stages of a pipeline.
        experts: of each router of the full model, in order, by the router's path there.
        device: of the counts.

    Attributes:
        routers: those of ``model``, by their number in the full model.
    """

    def __init__(
        self, model: nn.Module, experts: Mapping[str, int], device: torch.device | str
    ) -> None:
        found, paths = routers_of(model), list(experts)
        # Names of a part of a model are the full model's; wrappers of a full one may change them.
        numbers = range(len(paths)) if len(found) == len(paths) else map(paths.index, found)
        self.routers = dict(zip(numbers, found.values(), strict=True))
        shape = (len(paths), max(experts.values(), default=0))
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
        """The last step's tokens of this rank, (layers, experts) int64; without routers empty."""
        return self._counts

    def _hook(self, number: int) -> Any:
        def count(_: nn.Module, __: Any, output: Any) -> None:
            if not (self._counting and _is_training()):
                return
            chosen = output[2].to_local() if isinstance(output[2], DTensor) else output[2]
            chosen = chosen.detach().flatten()
            self._counts[number].scatter_add_(0, chosen, torch.ones_like(chosen))

        return count


def shares(counts: Tensor) -> list[list[float]] | None:
    """Returns the share of a layer's choices that each expert got, from the sums over all ranks."""
    if not counts.numel():
        return None
    loads: list[list[float]] = (counts / counts.sum(1, keepdim=True)).tolist()
    return loads


def _is_training() -> bool:
    """Returns whether a forward trains, and does not recompute, validate or find shapes."""
    # Of the package, which other runs do without.
    plan_api = sys.modules.get("plan_api")
    validates = plan_api is not None and plan_api.is_validating()
    # Backward, which recomputes layers, runs hooks again.
    in_backward = torch._C._current_graph_task_id() != -1
    return torch.is_grad_enabled() and not in_backward and not validates
