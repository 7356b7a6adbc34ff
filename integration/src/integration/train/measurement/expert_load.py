"""Counts how many tokens chose each expert of a mixture, in the forwards of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# transformers' routers, which return logits, weights and choices (tokens, choices).
_ROUTER = "TopKRouter"


class ExpertLoad:
    """Hooks of a model's routers.

    Ranks that take the same tokens count them each, so shares of the sums over all ranks are those
    of the tokens.

    Args:
        model: parallelized, with all of its layers.
        device: of the counts.
    """

    def __init__(self, model: nn.Module, device: torch.device | str) -> None:
        routers = [module for module in model.modules() if _is_router(module)]
        experts = {int(module.num_experts) for module in routers}  # type: ignore[arg-type]
        shape = (len(routers), max(experts, default=0))
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._counting = False
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._hook(layer))

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

    def _hook(self, layer: int) -> Any:
        def count(_: nn.Module, __: Any, output: Any) -> None:
            # Backward, which recomputes layers, runs hooks again.
            if not self._counting or torch._C._current_graph_task_id() != -1:
                return
            chosen = output[2].to_local() if isinstance(output[2], DTensor) else output[2]
            chosen = chosen.detach().flatten()
            self._counts[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

        return count


def shares(counts: Tensor) -> list[list[float]] | None:
    """Returns the share of a layer's choices that each expert got, from the sums over all ranks."""
    if not counts.numel():
        return None
    loads: list[list[float]] = (counts / counts.sum(1, keepdim=True)).tolist()
    return loads


def _is_router(module: nn.Module) -> bool:
    return any(cls.__name__.endswith(_ROUTER) for cls in type(module).__mro__)
