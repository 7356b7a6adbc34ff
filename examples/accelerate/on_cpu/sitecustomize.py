"""Records what ranks of unchanged scripts train, on CPUs that accelerate takes for accelerators.

Python imports this module as it starts, where ``PYTHONPATH`` leads to its folder. It does nothing
outside of the ranks that ``own_scripts.py`` starts. ``RECORD`` is the path of its files:

- ``RECORD-RANK.jsonl``: the placements of each model's parameters, and each loss;
- ``RECORD.pt``, of rank 0: of each model that was trained, its trainable parameters as `prepare`
  returned them and after training.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState

Weights = dict[str, torch.Tensor]
_models: list[tuple[torch.nn.Module, Weights]] = []
_trained: list[dict[str, Weights]] = []


def _report_accelerators() -> None:
    """Lets accelerate shard on gloo: on CPUs it would use DDP."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def _declare_torchvision() -> None:
    """Declares operators that torchvision describes as it is imported, if it can't load its own.

    PyPI's torchvision is compiled for CUDA, and a CPU's torch does not load its library.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", signature)


def _record(path: str) -> None:
    """Wraps the methods of `Accelerator` that scripts call before, while and after they train."""
    rank = int(os.environ["RANK"])
    lines = Path(f"{path}-{rank}.jsonl")
    prepare, backward = Accelerator.prepare, Accelerator.backward
    free_memory, end_training = Accelerator.free_memory, Accelerator.end_training
    save_state = Accelerator.save_state

    def write(**values: Any) -> None:
        with lines.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def new_prepare(self: Any, *args: Any, **options: Any) -> Any:
        prepared = prepare(self, *args, **options)
        for model in self._models:
            if all(model is not known for known, _ in _models):
                write(placements=_placements(model))
                _models.append((model, _weights(model)))
        return prepared

    def new_backward(self: Any, loss: torch.Tensor, **options: Any) -> None:
        write(loss=loss.item())
        backward(self, loss, **options)

    def save() -> list[dict[str, Weights]]:
        now = [{"start": start, "end": _weights(model)} for model, start in _models]
        if rank == 0:
            torch.save(_trained + now, f"{path}.pt")
        return now

    def finish() -> None:
        _trained.extend(save())
        _models.clear()

    def new_save_state(self: Any, *args: Any, **options: Any) -> Any:
        save()  # for scripts that do not end by `end_training`
        return save_state(self, *args, **options)

    def new_free_memory(self: Any, *objects: Any) -> Any:
        finish()
        return free_memory(self, *objects)

    def new_end_training(self: Any) -> None:
        finish()
        end_training(self)

    Accelerator.prepare, Accelerator.backward = new_prepare, new_backward
    Accelerator.free_memory, Accelerator.end_training = new_free_memory, new_end_training
    Accelerator.save_state = new_save_state


def _placements(model: torch.nn.Module) -> list[str]:
    """Returns the names of the types of placements of a model's parameters; empty: no DTensor."""
    placements = [getattr(param, "placements", ()) for param in model.parameters()]
    return sorted({type(placement).__name__ for each in placements for placement in each})


def _weights(model: torch.nn.Module) -> Weights:
    """Returns copies of the whole trainable parameters; every rank calls it."""
    return {
        name: getattr(param.detach(), "full_tensor", param.detach)().clone()
        for name, param in model.named_parameters()
        if param.requires_grad
    }


if "RECORD" in os.environ:
    _declare_torchvision()
    if "RANK" in os.environ:
        if not torch.accelerator.is_available():
            _report_accelerators()
        _record(os.environ["RECORD"])
