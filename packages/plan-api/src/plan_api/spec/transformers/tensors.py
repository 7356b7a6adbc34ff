"""The tensors that transformers' models create in their own code, as entries of a plan.

A `_tp_plan` says nothing of them, as it shards by hooks of modules in which all other tensors are
local. Where parameters are DTensors, so have to be the tensors that meet them: masks and positions
that a model passes to its layers, and what modules make themselves. Recurrent layers make many, in
loops over parts of a sequence; they run on local tensors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.spec.plan_entries import PlanEntries

__all__ = [
    "check_runs_on_dtensors",
    "is_inside_any",
    "module_patterns",
    "place_created_tensors",
    "recurrent_layers",
]

_MODEL_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "labels")
# That models and attention pass on as plain tensors: the same for all samples, or for all heads.
_PASSED_ON = (
    "attention_mask", "position_ids", "attention_scaling", "query_positions", "key_positions",
)  # fmt: skip
# Arguments, and parts of names of classes, of layers that keep a state along the sequence.
_STATE = "cache_params"
_STATEFUL = ("LightningAttention",)
# Classes whose own code makes tensors from positions or sizes, which are the same on all ranks.
_CREATING = (
    "Llama4TextAttention",  # scales by positions, in layers without rotary embeddings
    "PhimoeRotaryEmbedding",  # frequencies, in each call
    "DeepseekV4Indexer",  # which compressed tokens come before a query
    "DeepseekV4CSACompressor",
    "DeepseekV4HCACompressor",
)
# Classes whose own code draws random numbers, of which static mode would draw a rank's own.
_DRAWING = ("PhimoeTopKRouter",)
_UNSUPPORTED = {
    "DogeAttention": "torch's backward of DTensors cannot view the transposed gradient of its "
    "dynamic mask ('view size is not compatible with input tensor's size and stride')",
    "InklingTopkRouter": "DTensor has no sharding strategy for the backward of log_sigmoid",
}


def check_runs_on_dtensors(model: nn.Module) -> None:
    """Refuses models of whose layers DTensors have no backward.

    Raises:
        ValueError: names the module and the reason.
    """
    for name, module in model.named_modules():
        if reason := _UNSUPPORTED.get(type(module).__name__):
            raise ValueError(
                f"from_tp_plan: expected layers that run on DTensors, got {type(module).__name__} "
                f"({name}) of {type(model).__name__}: {reason}; write a plan that runs it on local "
                f"tensors by plan.local"
            )


def recurrent_layers(modules: Mapping[str, nn.Module]) -> list[str]:
    """Returns the paths of layers that keep a state along the sequence, such as Mamba's.

    Args:
        modules: of a model, by path.
    """
    return [
        path
        for path, module in modules.items()
        if _STATE in inspect.signature(module.forward).parameters
        or any(name in type(module).__name__ for name in _STATEFUL)
    ]


def is_inside_any(path: str, regions: Collection[str]) -> bool:
    """Whether a module is one of some modules, or in one of them."""
    return any(path == region or path.startswith(f"{region}.") for region in regions)


def place_created_tensors(
    plan: PlanEntries,
    modules: Mapping[str, nn.Module],
    recurrent: Sequence[str],
    data: Sequence[str],
    tp: str | None,
) -> None:
    """Places the inputs of a model, and the tensors that its code creates.

    Args:
        plan: to which entries are added.
        modules: of the model, by path.
        recurrent: the paths of those that run on local tensors; along ``tp`` each rank computes
            all of them.
        data: the axes along which batches are sharded.
        tp: the axis of tensor parallelism; None: there is none.
    """
    along = [*data, *([] if tp is None else [tp])]
    samples = [Shard(0) if axis in data else Replicate() for axis in along]
    copies: list[Placement] = [Replicate()] * len(along)
    for path, argument in dict.fromkeys(_plain_inputs(modules, recurrent)):
        where = f"{path}.<in:{argument}>" if path else f"<in:{argument}>"
        plan.shard(where, copies if path else samples, along)
    creating = [path for path, module in modules.items() if type(module).__name__ in _CREATING]
    for path in module_patterns(creating) if along else ():
        plan.factory(path, copies, along)
    drawing = [path for path, module in modules.items() if type(module).__name__ in _DRAWING]
    for path in module_patterns(drawing) if data else ():
        plan.eager(path)
    masked = [
        path
        for path in recurrent
        if "attention_mask" in inspect.signature(modules[path].forward).parameters
    ]
    for path in module_patterns(masked) if along else ():
        plan.shard(f"{path}.<in:attention_mask>", samples, along)
    for path in module_patterns(recurrent) if along else ():
        if data:
            plan.annotate(rf"{path}\..*\.grad", [Partial()] * len(data), data)
        plan.local(path, samples, along)


def _plain_inputs(
    modules: Mapping[str, nn.Module], recurrent: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yields the arguments whose plain tensors meet DTensor parameters: inputs and masks."""
    arguments = {
        name: inspect.signature(module.forward).parameters for name, module in modules.items()
    }
    yield from (("", argument) for argument in _MODEL_INPUTS if argument in arguments[""])
    alike: dict[str, list[str]] = {}
    for name in filter(None, modules):
        if not is_inside_any(name, recurrent):
            alike.setdefault(_of_any_layer(name), []).append(name)
    every = [*filter(None, modules)]
    for argument in _PASSED_ON:
        for path, names in alike.items():
            taking = [
                name
                for name in names
                if argument in arguments[name] and not arguments[name].keys() & set(_MODEL_INPUTS)
            ]
            whole = taking == [name for name in every if _of_any_layer(name) == path]
            paths = [path] if whole else map(re.escape, taking)
            yield from ((one, argument) for one in paths)


def module_patterns(paths: Sequence[str]) -> list[str]:
    """Returns patterns that match these paths only, one for the same module of several layers.

    Args:
        paths: of modules.
    """
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(_of_any_layer(path), []).append(path)
    return [f"({'|'.join(map(re.escape, found))})" for found in alike.values()]


def _of_any_layer(name: str) -> str:
    return re.sub(r"(?<=\\.)\d+(?=\\.|$)", r"\\d+", re.escape(name))
