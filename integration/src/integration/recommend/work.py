"""Counts the work of a model's layers under an inner product, on rank 0 of a fake world.

The trainer's system parallelizes the model, with one layer of each kind and with two, and the
simulator records a step of one sample of each data parallel rank. The difference is the work of a
layer, and what remains is the root's: embeddings, head and loss. DeepSeek-V3's layers are of two
kinds, those without experts and those with them; predictions use their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.simulate.recorder import EventRecorder, MemoryKind
from integration.data import Batch, Modality
from integration.data.digits import CHANNELS, SIDE
from integration.errors import UsageError
from integration.models import ModelShape, build_model_on_meta, loss_of
from integration.scale.strategies import WorldAxis
from integration.scale.traffic import StepWork, step_work
from integration.systems import Degrees
from integration.train.validation import ValidatedRun
from testkit import fake_mesh

__all__ = ["InnerWork", "Part", "axes_of", "count_work", "layers_of"]

# Names of the field with the number of layers.
_DEPTHS = ("num_hidden_layers", "depth")
# Of DeepSeek-V3's shape: the number of layers without experts, the first ones.
_DENSE = "first_k_dense_replace"
# Gradients are reduced along these axes by data parallelism, which predictions add.
_DATA_AXES = ("cp", "ep")


@dataclass(frozen=True)
class Part:
    """The work of a rank for one sample, in a layer or in the root.

    Attributes:
        work: compute and collectives, without reductions of gradients of all ranks.
        elements: elements of the rank's parameters, without those of `experts`.
        experts: elements of parameters that are sharded over expert parallel ranks.
        saved: bytes of activations that forward saves for backward.
    """

    work: StepWork
    elements: int
    experts: int
    saved: int

    def plus(self, other: Part, times: int = 1) -> Part:
        """Returns the sum of this part and ``times`` the other; ``times`` may be negative."""
        return Part(
            self.work.plus(other.work, times), self.elements + times * other.elements,
            self.experts + times * other.experts, self.saved + times * other.saved,
        )  # fmt: skip

    def divided(self, number: int) -> Part:
        """Returns this part divided by a number, rounded."""
        return Part(
            self.work.divided(number), round(self.elements / number),
            round(self.experts / number), round(self.saved / number),
        )  # fmt: skip


@dataclass(frozen=True)
class InnerWork:
    """The work of a model under an inner product.

    Attributes:
        root: of embeddings, head and loss.
        layer: of one layer, the mean of all.
        layers: number of layers of the model.
        largest: elements of the rank's parameters in the largest layer.
        temporary: bytes of activations that a step allocates beyond the saved ones.
        boundary: bytes of the hidden states of a sample, of a rank, between two layers.
    """

    root: Part
    layer: Part
    layers: int
    largest: int
    temporary: int
    boundary: int


def layers_of(shape: ModelShape) -> int:
    """Returns the number of layers of a model.

    Raises:
        UsageError: its shape has no field for it.
    """
    return int(getattr(shape, _depth_field(shape)))


def axes_of(degrees: Degrees) -> tuple[WorldAxis, ...]:
    """Returns the axes of the mesh of degrees, outermost first; neighbours are the innermost."""
    axes, stride = [], 1
    for name, size in reversed(degrees.axes.items()):
        axes.append(WorldAxis(name, size, stride))
        stride *= size
    return tuple(reversed(axes))


def count_work(run: ValidatedRun) -> InnerWork:
    """Counts the work of a model.

    Args:
        run: an inner product on the CPU: without pipeline, with ``ep`` data parallel ranks, and
            with one sample of each.

    Raises:
        UsageError: the model cannot be recorded with fewer layers.
    """
    axes, numbers = axes_of(run.system.degrees), _numbers(run.shape)
    kinds = range(len(numbers))
    once = _count(run, axes, [1 for _ in kinds])
    twice = [_count(run, axes, [1 + (each == kind) for each in kinds]) for kind in kinds]
    layers = [two.whole.plus(once.whole, -1) for two in twice]
    root, total = once.whole, Part(StepWork(), 0, 0, 0)
    for layer, number in zip(layers, numbers, strict=True):
        root, total = root.plus(layer, -1), total.plus(layer, number)
    return InnerWork(
        root, total.divided(sum(numbers)), sum(numbers),
        largest=max(layer.elements + layer.experts for layer in layers),
        temporary=max(two.most - two.whole.saved for two in twice), boundary=_boundary(run),
    )  # fmt: skip


@dataclass(frozen=True)
class _Counted:
    whole: Part
    most: int


def _numbers(shape: ModelShape) -> list[int]:
    """Returns the number of layers of each kind: those without experts, and the others."""
    layers = layers_of(shape)
    dense: int = getattr(shape, _DENSE, 0)
    return [dense, layers - dense] if 0 < dense < layers else [layers]


def _count(run: ValidatedRun, axes: tuple[WorldAxis, ...], numbers: list[int]) -> _Counted:
    """Counts the work of the model with these numbers of layers of each kind."""
    sizes = {_depth_field(run.shape): sum(numbers)}
    if len(numbers) > 1:
        sizes[_DENSE] = numbers[0]
    shape = replace(run.shape, **sizes)
    world, data = 1, run.system.degrees.data
    for axis in axes:
        world *= axis.size
    with fake_mesh((world,)):
        model = build_model_on_meta(shape)
        dtype = run.system.compute_dtype or torch.float32
        counted = torch.bfloat16 if _route_evenly(model) else dtype
        model = model.to(counted)  # as gathered; no casts of weights are saved
        model = run.system.parallelize(model, shape, world)
        batch = _batch(shape, data * run.config.micro_batch, run.config.sequence_length)
        with EventRecorder() as recorder:
            recorder.watch(model.to_empty(device="cpu"))
            _loss(model, batch).backward()  # the first step also compares plans across ranks
            model.zero_grad()
            before = recorder.allocated(MemoryKind.ACTIVATIONS)
            recorder.start_step()
            loss = _loss(model, batch)
            saved = recorder.allocated(MemoryKind.ACTIVATIONS) - before
            loss.backward()
            recorder.finish_step()
        mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        work = _without_gradients(step_work(recorder, axes, mesh))
        most = recorder.most[MemoryKind.ACTIVATIONS] - before
        elements, experts = _elements(model)
    times = dtype.itemsize // counted.itemsize
    work = replace(
        work, nbytes=times * work.nbytes,
        traffic=tuple(replace(one, nbytes=times * one.nbytes) for one in work.traffic),
    )  # fmt: skip
    return _Counted(Part(work, elements, experts, times * saved), times * most)


def _depth_field(shape: ModelShape) -> str:
    names = {field.name for field in fields(shape)}
    for name in _DEPTHS:
        if name in names:
            return name
    raise UsageError(
        f"--model: expected a shape with a field {' or '.join(_DEPTHS)}, whose layers are counted,"
        f" got {type(shape).__name__} with {', '.join(sorted(names))}; add one"
    )


def _boundary(run: ValidatedRun) -> int:
    config, degrees = run.config, run.system.degrees
    tokens = config.sequence_length
    if run.shape.modality is not Modality.TEXT:
        tokens = (SIDE // getattr(run.shape, "patch_size", 1)) ** 2
    width = getattr(run.shape, "hidden_size", 0)
    itemsize = (run.system.compute_dtype or torch.float32).itemsize
    return int(tokens * width * itemsize // (degrees.cp * (degrees.tp if degrees.sp else 1)))


def _batch(shape: ModelShape, samples: int, length: int) -> Batch:
    numbers = torch.zeros(samples, dtype=torch.long)
    if shape.modality is Modality.TEXT:
        tokens = torch.zeros(samples, length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}
    image = torch.zeros(samples, CHANNELS, SIDE, SIDE)
    return {"x": image, "t": numbers, "y": numbers, "noise": image.clone()}


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(model(**batch))


def _route_evenly(model: nn.Module) -> bool:
    """Makes routers choose all experts equally often, as fake data chooses none.

    Returns:
        Whether there are experts; their operators are recorded in bfloat16.
    """
    config: Any = getattr(model, "config", None)
    experts = getattr(config, "num_local_experts", 0)
    if not experts:
        return False
    # Other implementations find the selected experts, and so need data; this one needs bfloat16.
    config._experts_implementation = "grouped_mm"
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(_choose_in_turn(experts))
    return True


def _choose_in_turn(experts: int) -> Callable[..., Any]:
    def choose(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, index, weights = args
        local = getattr(index, "_local_tensor", index)
        chosen = (torch.arange(local.numel()) % experts).view(local.shape)
        return hidden, chosen, weights

    return choose


def _elements(model: nn.Module) -> tuple[int, int]:
    """Returns the elements of parameters on this rank: of experts that "ep" shards, and others."""
    others = experts = 0
    for param in model.parameters():
        tensor: Any = param
        is_expert, local = False, tensor
        if isinstance(tensor, DTensor):
            local, names = tensor._local_tensor, tensor.device_mesh.mesh_dim_names or ()
            is_expert = "ep" in names and tensor.placements[names.index("ep")].is_shard()
        if is_expert:
            experts += local.numel()
        else:
            others += local.numel()
    return others, experts


def _without_gradients(work: StepWork) -> StepWork:
    """Leaves out reductions along axes of data parallel ranks: those of gradients."""
    others = (
        one for one in work.traffic if one.op != "all_reduce" or one.axis.name not in _DATA_AXES
    )
    return replace(work, traffic=tuple(others))
