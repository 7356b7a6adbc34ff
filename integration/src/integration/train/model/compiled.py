"""Regional compilation: torch.compile for each layer, eager for the rest.

As in torchtitan (torchtitan/models/llama3/parallelize.py): layers are identical, so that they share
one graph, and what runs between them, such as the hooks of `fully_shard`, is not traced.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from integration.systems.base import Backend


def compile_layers(layers: Sequence[nn.Module], backend: Backend) -> None:
    """Compiles the `forward` of each layer as one graph; call it after `recompute_activations`.

    A layer with a graph break raises torch's error in the first step.
    """
    if backend == "none":
        return
    # Dynamo reads the `grad` of a layer's inputs.
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
