"""Finds the routers of transformers' mixtures of experts."""

from torch import nn

# Names of transformers' classes end so; their outputs are logits, weights and choices of experts.
_ROUTER = "topkrouter"


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the routers of a model by their paths, in its order."""
    return {path: module for path, module in model.named_modules() if _is_router(module)}


def _is_router(module: nn.Module) -> bool:
    return any(cls.__name__.lower().endswith(_ROUTER) for cls in type(module).__mro__)
