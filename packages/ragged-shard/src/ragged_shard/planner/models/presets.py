"""Public models by name: their published configurations and the shapes of their parameters.

A file in ``preset_data`` has the keys of the published config.json that decide the parameters, and
the parameters that ``hugging_face.build_model`` finds for them: presets need neither torch nor
transformers nor a network. ``python -m ragged_shard.planner.models.write_presets`` writes the
files; a test compares them with what transformers builds.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragged_shard.planner.models.config import ModelConfig
from ragged_shard.planner.models.hugging_face import count_mtp_layers
from ragged_shard.planner.models.shapes import (
    ExpertLayout,
    ModelShapes,
    ParameterGroup,
    add_mtp_layers,
    make_parameter,
)

FOLDER = Path(__file__).with_name("preset_data")


@dataclass(frozen=True)
class Preset:
    """One public model.

    Attributes:
        source: The repository on the Hugging Face hub whose config.json ``values`` are from.
        parameters: The published number of parameters.
        values: The keys of that config.json that decide the parameters.
        layouts: By layout of the experts, "published" or "stacked", the runs of equal groups.
    """

    source: str
    parameters: int
    values: Mapping[str, Any]
    layouts: Mapping[str, list[dict[str, Any]]]


def preset_model(
    name: str, *, experts: ExpertLayout | None = None, with_mtp: bool = False
) -> ModelShapes:
    """Returns the parameters of a preset.

    Args:
        name: A key of ``PRESETS``, such as ``"deepseek-v3"``.
        experts: The layout of routed experts; by default as published.
        with_mtp: Adds the layer of multi-token prediction, which deepseek-v3 has.

    Raises:
        ValueError: No preset has this name, or the model has no such experts or layers.
    """
    if name not in PRESETS:
        raise ValueError(f"expected one of the presets {', '.join(PRESETS)}, got {name!r}")
    preset = PRESETS[name]
    runs = preset.layouts["stacked" if experts == "stacked" else "published"]
    model = ModelShapes(name, tuple(group for run in runs for group in expand_run(run)))
    if experts == "separate" and any(
        parameter.kind == "expert" and len(parameter.shape) > 2
        for group in model.groups
        for parameter in group.parameters
    ):
        raise ValueError(f"{name}: expected 'stacked', as its experts are published so only")
    if with_mtp:
        model = add_mtp_layers(model, count_mtp_layers(ModelConfig(name, preset.values)))
    return model


def expand_run(run: Mapping[str, Any]) -> Iterator[ParameterGroup]:
    """Returns the groups of a run: ``count`` equal ones, from ``layers.<first>``, or ``root``.

    Its ``parameters`` are shapes by name, in lists; with ``experts``, each list is repeated, and
    ``{}`` in a name is the index.
    """
    parameters = tuple(
        make_parameter(name.format(expert), tuple(shape))
        for block in run["parameters"]
        for expert in range(block.get("experts", 1))
        for name, shape in block["shapes"].items()
    )
    if run["first"] is None:
        yield ParameterGroup("root", parameters)
        return
    for layer in range(run["first"], run["first"] + run["count"]):
        yield ParameterGroup(f"layers.{layer}", parameters)


def _read(name: str) -> Preset:
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Preset(data["source"], data["parameters"], data["config"], data["layouts"])


#: The presets, by the name that the command line takes.
PRESETS: Mapping[str, Preset] = {
    name: _read(name)
    for name in (
        "llama3-8b",
        "llama3-70b",
        "llama3-405b",
        "mixtral-8x7b",
        "deepseek-v3",
        "gpt-oss-120b",
    )
}
