"""Counts transformers' models with a `_tp_plan` by what `Plan.from_tp_plan` does with them.

Each class for causal language modelling is built with a small config, and its plan is made and
lowered on a fake mesh; nothing is trained.

    python -m tools.transformers_plans
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from testkit import fake_mesh

__all__ = ["outcome", "outcomes"]

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 64,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_intermediate_size": 48, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "expert_ffn_hidden_size": 48, "ffn_hidden_size": 64,
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "index_n_heads": 2, "index_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_SMALL_SIZES = "its config does not take the small sizes"


def outcomes() -> Iterator[tuple[str, str]]:
    """Yields the name of each config with a `base_model_tp_plan`, and the outcome of its model."""
    import transformers.models

    for module in sorted(one.name for one in pkgutil.iter_modules(transformers.models.__path__)):
        configs = _module(f"transformers.models.{module}.configuration_{module}")
        for name, config in vars(configs).items() if configs else ():
            own = inspect.isclass(config) and config.__module__ == configs.__name__
            if own and getattr(config, "base_model_tp_plan", None):
                modeling = _module(f"transformers.models.{module}.modeling_{module}")
                yield name, outcome(_causal_lm(modeling, config), config)


def outcome(model_class: Any, config: Any) -> str:
    """Returns ``accepted``, or the reason why there is no plan for a class of models."""
    from plan_api import Plan, lower

    if model_class is None:
        return "no class for causal language modelling"
    try:
        model = _small(model_class, config)
    except Exception:  # configs check themselves, each in its own way
        return _SMALL_SIZES
    with fake_mesh((2,), ("tp",)) as mesh:
        try:
            lower(Plan.from_tp_plan(model, mesh), model)
        except ValueError as error:
            return _reason(str(error))
        except ZeroDivisionError:  # fewer heads than key-value heads
            return _SMALL_SIZES
    return "accepted"


def _small(model_class: Any, config: Any) -> nn.Module:
    names = set(inspect.signature(config.__init__).parameters)
    if dataclasses.is_dataclass(config):
        names |= {field.name for field in dataclasses.fields(config)}
    with torch.device("meta"):
        model: nn.Module = model_class(
            config(**{name: size for name, size in _SIZES.items() if name in names})
        )
    return model


def _causal_lm(modeling: Any, config: Any) -> Any:
    for name, found in vars(modeling).items() if modeling else ():
        if name.endswith("ForCausalLM") and getattr(found, "config_class", None) is config:
            return found
    return None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _reason(message: str) -> str:
    """Returns the first line of an error, without the names of modules."""
    style = re.search(r"from_tp_plan: (?:.*got )?('\w+') (?:for|of) ", message)
    return f"refused: style {style[1]}" if style else f"refused: {message.splitlines()[0]}"


def main() -> None:
    """Prints a row for each outcome, with the number of models and their names."""
    found = defaultdict(list)
    for name, result in outcomes():
        found[result].append(name.removesuffix("Config").removesuffix("Text"))
    print("| outcome | models | |\n|---|---|---|")
    for result, names in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"| {result} | {len(names)} | {', '.join(names)} |")


if __name__ == "__main__":
    main()
