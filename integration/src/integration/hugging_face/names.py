"""Maps parameters to the tensors in files that they consist of.

Files have separate matrices for each expert, where transformers 5 has one parameter for all experts
of a layer, with gate and up projection in one (transformers/conversion_mapping.py, "mixtral").
"""

import re
from collections.abc import Callable, Mapping

from torch import nn

from fsdp.checkpoint import TensorPart

Shape = tuple[int, ...]

_EXPERTS = re.compile(r"(?P<layer>.+)\.mlp\.experts\.(?P<kind>gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(?P<layer>.+)\.mlp\.gate\.weight")
_LAYER = "{layer}.block_sparse_moe."


def names_in_files(model: nn.Module) -> Callable[[str], str | list[TensorPart]]:
    """Returns the argument ``rename`` of `fsdp.checkpoint` for a model.

    Args:
        model: full, may be on meta.
    """
    if getattr(getattr(model, "config", None), "model_type", None) != "mixtral":
        return str
    shapes: Mapping[str, Shape] = {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    return lambda name: _mixtral_parts(name, shapes.get(name, ()))


def _mixtral_parts(name: str, shape: Shape) -> str | list[TensorPart]:
    if match := _ROUTER.fullmatch(name):
        return _LAYER.format(**match.groupdict()) + "gate.weight"
    match = _EXPERTS.fullmatch(name)
    if match is None:
        return name
    experts, rows, columns = shape
    parts = ("w1", "w3") if match["kind"] == "gate_up_proj" else ("w2",)
    rows //= len(parts)
    layer = _LAYER.format(layer=match["layer"])
    return [
        TensorPart(
            name=f"{layer}experts.{expert}.{part}.weight",
            shape=(rows, columns),
            offsets=(expert, index * rows, 0),
            sizes=(1, rows, columns),
        )
        for expert in range(experts)
        for index, part in enumerate(parts)
    ]
