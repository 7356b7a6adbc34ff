"""Maps parameters to the tensors in files that they consist of.

Files have separate matrices for each expert, where transformers 5 has one parameter for all experts
of a layer, with gate and up projection in one (transformers/conversion_mapping.py, "mixtral").
"""

import re
from dataclasses import dataclass

from torch import nn

Shape = tuple[int, ...]

_EXPERTS = re.compile(r"(?P<layer>.+)\.mlp\.experts\.(?P<kind>gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(?P<layer>.+)\.mlp\.gate\.weight")
_LAYER = "{layer}.block_sparse_moe."


@dataclass(frozen=True)
class ParameterChunk:
    """A tensor in a file, and the box of a parameter that it contains.

    Attributes:
        name: name in the file.
        shape: shape in the file: ``sizes``, or ``sizes`` without a leading 1.
        offsets: offsets of the box in the parameter.
        sizes: sizes of the box.
    """

    name: str
    shape: Shape
    offsets: Shape
    sizes: Shape


def parameter_chunks(model: nn.Module) -> dict[str, list[ParameterChunk]]:
    """Returns the chunks of each parameter and persistent buffer of a model, by name, in order.

    Of tied parameters only the first has chunks, as files contain only that one.
    """
    is_mixtral = getattr(getattr(model, "config", None), "model_type", None) == "mixtral"
    chunks: dict[str, list[ParameterChunk]] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        shape = tuple(tensor.shape)
        chunks[name] = _mixtral_chunks(name, shape) if is_mixtral else [_single_chunk(name, shape)]
    return chunks


def _mixtral_chunks(name: str, shape: Shape) -> list[ParameterChunk]:
    if match := _ROUTER.fullmatch(name):
        return [_single_chunk(_LAYER.format(**match.groupdict()) + "gate.weight", shape)]
    match = _EXPERTS.fullmatch(name)
    if match is None:
        return [_single_chunk(name, shape)]
    experts, rows, columns = shape
    parts = ("w1", "w3") if match["kind"] == "gate_up_proj" else ("w2",)
    rows //= len(parts)
    layer = _LAYER.format(layer=match["layer"])
    return [
        ParameterChunk(
            name=f"{layer}experts.{expert}.{part}.weight",
            shape=(rows, columns),
            offsets=(expert, index * rows, 0),
            sizes=(1, rows, columns),
        )
        for expert in range(experts)
        for index, part in enumerate(parts)
    ]


def _single_chunk(name: str, shape: Shape) -> ParameterChunk:
    return ParameterChunk(name, shape, (0,) * len(shape), shape)
