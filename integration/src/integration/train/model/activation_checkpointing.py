"""Activation checkpointing: recomputes the activations of layers in backward.

The modes are torchtitan's (torchtitan/distributed/activation_checkpoint.py). Only `forward` of the
layers is replaced, by plan-api's, so that `fully_shard` and `parallelize_module` find the same
modules and names; under plans it is an entry of the plan.
"""

from collections.abc import Sequence
from types import MethodType

from torch import nn

from integration.systems.base import Recompute


def recompute_activations(layers: Sequence[nn.Module], mode: Recompute, *, every: int) -> None:
    """Makes layers recompute activations in backward; call it before parallelizing them.

    Args:
        layers: layers of a model, in order; their `forward` is replaced.
        mode: ``full`` recomputes each layer; ``selective-op`` recomputes all operators but matrix
            products and attention; ``selective-layer`` recomputes one of ``every`` layers.
        every: see ``selective-layer``.
    """
    if mode == "none":
        return
    # Imported on use: most runs recompute nothing.
    from plan_api.runtime.policies.recompute import recomputed_forward

    policy = "selective-op" if mode == "selective-op" else "full"
    for layer in layers[:: every if mode == "selective-layer" else 1]:
        # Bound as a method, so that a copy of the layer does not call the original.
        layer.forward = MethodType(recomputed_forward(type(layer).forward, policy), layer)
