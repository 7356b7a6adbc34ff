"""Products and their communication in one operator of torch, where ranks have symmetric memory.

On CUDA devices that read each other's memory, torch copies shards by peer-to-peer access while it
multiplies others (torch/distributed/_symmetric_memory). That takes the place of sends and receives
where a sequence is sharded before or after; torch has no such operator for sums that stay
replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from plan_api._compat import has_symmetric_memory, symmetric_memory_operators

__all__ = ["FusedOperators", "GatheredProduct", "fused_operators"]


@dataclass(frozen=True)
class GatheredProduct:
    """A gathered tensor, and its products.

    Attributes:
        whole: the gathered tensor.
        products: by each matrix.
    """

    whole: torch.Tensor
    products: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class FusedOperators:
    """Operators that multiply and communicate between the ranks of a group.

    Attributes:
        all_gather_matmul: as `torch.ops.symm_mem.fused_all_gather_matmul`.
        matmul_reduce_scatter: as `torch.ops.symm_mem.fused_matmul_reduce_scatter`.
        group: the name of the group.
    """

    all_gather_matmul: Callable[..., Any]
    matmul_reduce_scatter: Callable[..., Any]
    group: str

    @staticmethod
    def take(tensor: torch.Tensor, matrices: Sequence[torch.Tensor]) -> bool:
        """Whether the operators multiply a tensor by matrices: all have one dtype."""
        return bool(matrices) and all(one.dtype == tensor.dtype for one in matrices)

    def gathered(
        self, tensor: torch.Tensor, matrices: Sequence[torch.Tensor], dim: int
    ) -> GatheredProduct:
        """Gathers a tensor along a dim, and multiplies it.

        Args:
            tensor: this rank's shard, (..., features); of the same shape on all ranks.
            matrices: (features, out) each.
            dim: of the tensor; not the last one.
        """
        whole, products = self.all_gather_matmul(
            tensor.contiguous(), [*matrices], dim, self.group, return_A=True
        )
        # With a sequence per sample the operator returns rows in another order in memory.
        return GatheredProduct(
            whole.contiguous(), tuple(product.contiguous() for product in products)
        )

    def scattered(self, tensor: torch.Tensor, matrix: torch.Tensor, dim: int) -> torch.Tensor:
        """Multiplies a tensor, and returns this rank's shard of the sum over ranks.

        Args:
            tensor: this rank's, (..., features).
            matrix: (features, out).
            dim: of the product, which the number of ranks divides; not the last one.
        """
        product: torch.Tensor = self.matmul_reduce_scatter(
            tensor.contiguous(), matrix, "sum", dim, self.group
        )
        return product.contiguous()


def fused_operators(group: dist.ProcessGroup, device_type: str) -> FusedOperators | None:
    """Returns torch's operators on symmetric memory; all ranks of the group call it.

    Args:
        group: of the ranks that communicate.
        device_type: of the tensors.

    Returns:
        the operators; None where the ranks have no symmetric memory.
    """
    if not has_symmetric_memory(group, device_type):
        return None
    operators = symmetric_memory_operators()
    return FusedOperators(
        operators.fused_all_gather_matmul, operators.fused_matmul_reduce_scatter, group.group_name
    )
