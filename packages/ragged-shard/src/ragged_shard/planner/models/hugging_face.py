"""The parameters of a configured model: those of the model that transformers builds on meta.

Names, shapes and order are transformers' own: within a layer, the order in which
``named_parameters()`` yields them, which is the order of the buffer that FSDP makes.

Routed experts have two layouts. "stacked": one tensor per kind of matrix holds all experts, as in
transformers 5. "separate": every expert's matrices are tensors of their own, as in most published
checkpoints; transformers' own conversion of checkpoints gives their names and shapes.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ragged_shard.planner.models.config import ModelConfig
from ragged_shard.planner.models.shapes import (
    ExpertLayout,
    ModelShapes,
    ParameterGroup,
    add_mtp_layers,
    make_parameter,
)

#: Names of model types that transformers knows by another name.
_MODEL_TYPES = {"kimi_k2": "deepseek_v3"}
#: Keys that have no effect on shapes, but would make transformers quantize or load remote code.
_IGNORED = ("model_type", "auto_map", "quantization_config")
#: A parameter of a transformer layer: "model.layers.3.mlp.up_proj.weight".
_LAYER = re.compile(r"(?:layers|h|blocks?)\.(\d+)\.(.+)")
#: A matrix of a separate expert, and its number where matrices are numbered, as Mixtral's w1 to w3.
_EXPERT = re.compile(r"\.experts\.(\d+)\.(?:w(\d+)\b)?")

_Shapes = dict[str, tuple[int, ...]]


def build_model(
    config: ModelConfig, *, experts: ExpertLayout | None = None, with_mtp: bool = False
) -> ModelShapes:
    """Builds a configured model on the meta device and returns its parameters' shapes.

    Args:
        config: The configuration. As in transformers, missing keys have the defaults of the
            architecture. Quantization is ignored.
        experts: The layout of routed experts; by default that of the published checkpoints.
        with_mtp: Adds the layers of multi-token prediction (``num_nextn_predict_layers``), each a
            group of its own, without the embedding and head that they share with the model.

    Returns:
        One group per transformer layer, and ``root`` with the remaining parameters.

    Raises:
        ValueError: torch or transformers is missing, transformers cannot build the model, or the
            model has no such experts or layers.
    """
    try:  # the rest of the planner does without these two
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(
            f"{config.name}: reading a model's shapes needs {error.name}: "
            f"pip install ragged-shard[models]; the presets need neither torch nor transformers"
        ) from error
    model = _on_meta(config, torch, transformers)
    shapes = dict(_stacked(model) if experts == "stacked" else _published(model, transformers))
    groups = tuple(_grouped(shapes, f"{model.base_model_prefix}."))
    if experts == "separate" and any(
        parameter.kind == "expert" and len(parameter.shape) > 2
        for group in groups
        for parameter in group.parameters
    ):
        raise ValueError(
            f"{config.name}: expected an architecture with separate experts, got "
            f"{config.architecture}, which has its experts stacked only; pass 'stacked'"
        )
    result = ModelShapes(config.name, groups)
    return add_mtp_layers(result, count_mtp_layers(config)) if with_mtp else result


def count_mtp_layers(config: ModelConfig) -> int:
    """Returns the number of layers of multi-token prediction.

    Raises:
        ValueError: The model has none.
    """
    count = config.values.get("num_nextn_predict_layers")
    if not count or config.values.get("first_k_dense_replace") is None:
        raise ValueError(
            f"{config.name} has no layers of multi-token prediction, which only DeepSeek-V3 and "
            f"models like it have; leave them out"
        )
    return int(count)


def _on_meta(config: ModelConfig, torch: Any, transformers: Any) -> Any:
    model_type = _MODEL_TYPES.get(config.architecture, config.architecture)
    values = {key: value for key, value in config.values.items() if key not in _IGNORED}
    try:
        described = transformers.AutoConfig.for_model(model_type, **values)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(described)
    except Exception as error:  # whatever the model's own code raises
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{config.name}: transformers {transformers.__version__} cannot build a "
            f"{config.architecture!r} from this configuration: {reason}"
        ) from error


def _stacked(model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Returns the parameters of the model, a tied one once."""
    for name, parameter in model.named_parameters():
        yield name, tuple(parameter.shape)


def _published(model: Any, transformers: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Returns the parameters as in the published checkpoint, in the order of the model.

    A persistent buffer is a parameter there (DeepSeek-V3's correction of the router's bias). The
    separate experts replace the stacked ones, one expert after another.
    """
    tied = set(model.state_dict()) - {name for name, _ in model.named_parameters()}
    tied -= {name for name, _ in model.named_buffers()}
    waiting: _Shapes = {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        if ".experts." not in name and waiting:
            yield from _by_expert(waiting)
            waiting = {}
        converted = transformers.core_model_loading.revert_weight_conversion(model, {name: tensor})
        shapes = {key: tuple(value.shape) for key, value in converted.items()}
        if len(shapes) > 1:
            waiting |= shapes
        else:
            yield from shapes.items()
    yield from _by_expert(waiting)


def _by_expert(shapes: _Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """Sorts matrices by expert; within an expert by their number, or as they are."""

    def key(item: tuple[str, tuple[int, ...]]) -> tuple[int, int]:
        match = _EXPERT.search(item[0])
        return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)

    return sorted(shapes.items(), key=key)


def _grouped(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> Iterator[ParameterGroup]:
    """Returns one group per layer, in order, and ``root`` with the others."""
    layers: dict[int, _Shapes] = {}
    root: _Shapes = {}
    for name, shape in shapes.items():
        short = name.removeprefix(prefix)
        match = _LAYER.match(short)
        if match is None:
            root[short] = shape
        else:
            layers.setdefault(int(match[1]), {})[match[2]] = shape
    for layer, of_layer in layers.items():
        yield _group(f"layers.{layer}", of_layer)
    yield _group("root", root)


def _group(name: str, shapes: _Shapes) -> ParameterGroup:
    return ParameterGroup(name, tuple(make_parameter(*item) for item in shapes.items()))
