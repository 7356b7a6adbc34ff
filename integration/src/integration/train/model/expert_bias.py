"""Balances the load of experts by biases of their routers, without an auxiliary loss.

After a step, the bias of an expert that got fewer tokens than the mean of its layer grows by a
rate, and that of one with more is reduced by it. Biases are in the scores by which experts are
chosen, and not in the weights of their outputs. Loads are integers, so that biases have the same
bits on every rank and under every product.

Source: DeepSeek-V3, section 2.1.2 (https://arxiv.org/abs/2412.19437); Wang et al., algorithm 1
(https://arxiv.org/abs/2408.15664).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# A persistent buffer of transformers' routers, so that checkpoints have it.
_BIAS = "e_score_correction_bias"


@torch.no_grad()
def update_expert_biases(routers: Mapping[int, nn.Module], counts: Tensor, rate: float) -> None:
    """Moves the biases of routers by a rate, towards equal loads.

    Args:
        routers: of this rank, by the number of their row in ``counts``.
        counts: tokens of a step on all ranks, (layers, experts): integers, of any dtype; a multiple
            of them is as good.
        rate: by which a bias moves.
    """
    for number, router in routers.items():
        bias = getattr(router, _BIAS)
        own = counts[number, : bias.shape[0]]
        # The sign of mean - count, by integers.
        direction = (own.sum() - own * len(own)).sign()
        local = bias.to_local() if isinstance(bias, DTensor) else bias  # replicated
        local.add_(direction.to(local.dtype), alpha=rate)
