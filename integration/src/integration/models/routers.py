"""Finds the routers of transformers' mixtures of experts, and changes what they do."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from plan_api import RouterZLoss

# Names of transformers' classes end so; their outputs are logits, weights and choices of experts.
_ROUTER = "topkrouter"


def routers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the routers of a model by their paths, in its order."""
    return {path: module for path, module in model.named_modules() if _is_router(module)}


@dataclass(frozen=True)
class RouterSize:
    """The sizes of a router.

    Attributes:
        experts: among which a token chooses.
        choices: of a token.
    """

    experts: int
    choices: int

    @classmethod
    def of(cls, router: nn.Module) -> "RouterSize":
        """Returns the sizes of one of `routers_of`."""
        return cls(int(router.num_experts), int(router.top_k))  # type: ignore[arg-type]


@dataclass(frozen=True)
class RouterOptions:
    """What a run adds to routers.

    Attributes:
        z_loss: coefficient of their z-loss; 0: there is none.
        capacity_factor: of experts; None: they take all tokens.
    """

    z_loss: float = 0.0
    capacity_factor: float | None = None

    def install(self, model: nn.Module) -> "RouterZLoss | None":
        """Adds it to the routers of a model, if it has any, before it is parallelized.

        Returns:
            the z-loss, if there is one.
        """
        if not routers_of(model):
            return None
        if self.capacity_factor is not None:
            from plan_api import limit_expert_capacity  # on use, as other runs need only torch

            limit_expert_capacity(model, self.capacity_factor)
        if not self.z_loss:
            return None
        from plan_api import add_router_z_loss

        return add_router_z_loss(model, self.z_loss)


def _is_router(module: nn.Module) -> bool:
    return any(cls.__name__.lower().endswith(_ROUTER) for cls in type(module).__mro__)
