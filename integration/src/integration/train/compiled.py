"""Regional compilation: every layer by torch.compile, the rest eager.

As torchtitan's (torchtitan/models/llama3/parallelize.py): layers are alike, so one graph serves
all, and what happens between them, hooks of `fully_shard` first, stays outside of graphs.
"""

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

Backend = Literal["none", "aot_eager", "inductor"]


def compile_layers(layers: Sequence[nn.Module], backend: Backend) -> None:
    """Compiles the `forward` of layers, each as one graph; after `recompute_activations`.

    A layer that is no single graph raises torch's error in the first step.
    """
    if backend == "none":
        return
    # Dynamo looks at the `grad` of what a layer is given.
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
