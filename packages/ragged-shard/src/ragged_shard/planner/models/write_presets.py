"""Writes the shapes of the presets again: ``python -m ragged_shard.planner.models.write_presets``.

It needs the extra ``models``. A new preset is a file with ``source``, ``parameters`` and
``config``, and its name in presets.py.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ragged_shard.planner.models.config import ModelConfig
from ragged_shard.planner.models.hugging_face import build_model
from ragged_shard.planner.models.presets import FOLDER
from ragged_shard.planner.models.shapes import ModelShapes, ParameterShape

_EXPERT = re.compile(r"(\.experts\.)\d+(\.)")


def layouts_of(config: ModelConfig) -> dict[str, list[dict[str, Any]]]:
    """Returns a preset's layouts, of the model that transformers builds.

    Raises:
        ValueError: as ``build_model``.
    """
    return {
        "published": list(_runs(build_model(config))),
        "stacked": list(_runs(build_model(config, experts="stacked"))),
    }


def _runs(model: ModelShapes) -> Iterator[dict[str, Any]]:
    first = 0
    for parameters, equal in itertools.groupby(model.groups, key=lambda group: group.parameters):
        groups = list(equal)
        run = {"first": first, "count": len(groups), "parameters": list(_blocks(parameters))}
        if groups[0].name == "root":
            run["first"] = None
        first += len(groups)
        yield run


def _blocks(parameters: Iterable[ParameterShape]) -> Iterator[dict[str, Any]]:
    """Lists of shapes by name; experts, which are equal, are listed once."""
    for expert, same in itertools.groupby(parameters, key=lambda p: bool(_EXPERT.search(p.name))):
        shapes = [(_EXPERT.sub(r"\1{}\2", p.name), p.shape) for p in same]
        distinct = dict(shapes)
        yield (
            {"experts": len(shapes) // len(distinct), "shapes": distinct}
            if expert
            else {"shapes": distinct}
        )


def main() -> None:
    """Writes every file of the presets again."""
    for path in sorted(FOLDER.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        data["layouts"] = layouts_of(ModelConfig(path.stem, data["config"]))
        text = json.dumps(data, indent=1)
        compact = re.sub(r"\[\s*([\d,\s]+?)\s*\]", lambda m: f"[{' '.join(m[1].split())}]", text)
        path.write_text(f"{compact}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
