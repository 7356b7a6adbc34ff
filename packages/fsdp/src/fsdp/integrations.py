"""Hugging Face's accelerate and transformers with this package's `fully_shard`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp import api
from ragged_shard import RaggedShard

__all__ = ["install", "uninstall"]


@dataclass(frozen=True)
class _Attribute:
    """A value for an attribute of a module or class."""

    owner: Any
    name: str
    value: Any


_originals: list[_Attribute] = []  # of what is replaced


def install() -> None:
    """Makes accelerate and transformers, and so the Trainer, shard with this package.

    Afterwards this package shards the models that FSDP2 would: those of
    ``TrainingArguments(fsdp=..., fsdp_config={"fsdp_version": 2, ...})`` and of accelerate's
    ``FullyShardedDataParallelPlugin(fsdp_version=2)``, and those of
    ``from_pretrained(distributed_config=DistributedConfig(fsdp_size=...))``. Models that are
    sharded already stay as they are. A second call does nothing.

    Until `uninstall` it replaces:

    - ``fully_shard`` and ``register_fsdp_forward_method`` of ``torch.distributed.fsdp``, where
      accelerate and the Trainer look them up;
    - ``apply_fully_sharded_data_parallelism`` of ``transformers.distributed.mixin``, which then
      calls this package's `fully_shard`, with slices of dim 0 kept whole and tied weights in one
      call;
    - ``DtensorShardOperation`` of ``transformers.core_model_loading``, by a subclass that reads
      from a checkpoint the rows that a rank has under a `RaggedShard`, and its
      ``set_param_for_module``, for ranks that have none;
    - ``DistributedMixin.gather_sharded_state_dict_for_save`` of transformers, by one that raises
      for a sharded model that transformers does not know to be sharded, which it would write from
      one rank while the others wait.

    Those of transformers are replaced where it is installed.

    Raises:
        RuntimeError: this version of transformers has no such functions.
    """
    if _originals:
        return
    replacements = [
        _Attribute(torch_fsdp, "fully_shard", _like_torch(torch_fsdp.fully_shard)),
        _Attribute(
            torch_fsdp, "register_fsdp_forward_method", api.register_fsdp_forward_method
        ),
    ]  # fmt: skip
    if importlib.util.find_spec("transformers") is not None:
        replacements += _of_transformers()
    for new in replacements:
        _originals.append(_Attribute(new.owner, new.name, getattr(new.owner, new.name)))
        setattr(new.owner, new.name, new.value)


def uninstall() -> None:
    """Takes back what `install` replaced; sharded models stay as they are."""
    while _originals:
        original = _originals.pop()
        setattr(original.owner, original.name, original.value)


def _like_torch(stock: Any) -> Any:
    """This package's `fully_shard`, with ``fully_shard.state``, which pipeline stages call."""

    @functools.wraps(api.fully_shard)
    def fully_shard(*args: Any, **kwargs: Any) -> Any:
        return api.fully_shard(*args, **kwargs)

    fully_shard.state = stock.state  # type: ignore[attr-defined]
    return fully_shard


def _of_transformers() -> list[_Attribute]:
    """The replacements in transformers.

    Raises:
        RuntimeError: it has not what is replaced.
    """
    try:
        sharding = importlib.import_module("transformers.distributed.fsdp")
        loading = importlib.import_module("transformers.core_model_loading")
        mixin = importlib.import_module("transformers.distributed.mixin")
        apply, read = mixin.apply_fully_sharded_data_parallelism, loading.DtensorShardOperation
        assign = loading.set_param_for_module
        gather = mixin.DistributedMixin.gather_sharded_state_dict_for_save
    except (ImportError, AttributeError) as error:
        version = importlib.import_module("transformers").__version__
        raise RuntimeError(
            f"fsdp.integrations.install: expected a transformers that shards models by "
            f"DistributedConfig, 5.20 or newer, got {version} ({error}); upgrade it"
        ) from error
    return [
        _Attribute(mixin, apply.__name__, _sharding_whole_slices(sharding, apply)),
        _Attribute(loading, read.__name__, _reading_rows(read)),
        _Attribute(loading, assign.__name__, _assigning_nothing(assign)),
        _Attribute(mixin.DistributedMixin, gather.__name__, _checked_gather(gather)),
    ]


def _sharding_whole_slices(sharding: Any, stock: Any) -> Any:
    """Transformers' sharding of a model by its plan, before weights are loaded, with our calls."""

    @functools.wraps(stock)
    def apply(model: Any, *args: Any, **kwargs: Any) -> Any:
        # It ties weights only after loading, and FSDP2 then has one parameter in two groups.
        model.tie_weights(recompute_mapping=False)
        holders: dict[nn.Parameter, list[nn.Module]] = {}
        for module in model.modules():
            for param in module.parameters(recurse=False):
                holders.setdefault(param, []).append(module)
        native = sharding.fully_shard
        sharding.fully_shard = functools.partial(_shard_with_tied, holders)
        try:
            return stock(model, *args, **kwargs)
        finally:
            sharding.fully_shard = native

    return apply


def _shard_with_tied(
    holders: Mapping[nn.Parameter, Sequence[nn.Module]],
    module: nn.Module | Sequence[nn.Module],
    **options: Any,
) -> Any:
    """Shards modules together with those that have a parameter of theirs, too.

    Each rank has slices of dim 0, which are a box of the tensor, as the loader reads them.
    """
    given = [module] if isinstance(module, nn.Module) else list(module)
    # A parameter that an earlier call has sharded is another object now, with no holders.
    tied = [
        holder for one in given for param in one.parameters() for holder in holders.get(param, ())
    ]
    inside = {child for one in given for child in one.modules()}
    together = [*given, *dict.fromkeys(one for one in tied if one not in inside)]
    return api.fully_shard(
        together[0] if len(together) == 1 else together,
        shard_placement_fn=lambda param: Shard(0) if param.ndim else None,
        **options,
    )


def _reading_rows(stock: Any) -> Any:
    """A subclass of transformers' DtensorShardOperation that knows ragged shards."""

    class RaggedShardOperation(stock):  # type: ignore[misc]
        """Reads a rank's box of a checkpoint's tensor: rows, and columns of tensor parallelism."""

        def __init__(self, param: DTensor) -> None:
            super().__init__(param)
            self._box: tuple[slice, ...] | None = None
            if not _is_ragged(param):
                return
            shape, offset = compute_local_shape_and_global_offset(
                param.shape, self.device_mesh, self.placements
            )
            self._box = tuple(
                slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True)
            )
            self._sharded_dims = {0} | {p.dim for p in self.placements if isinstance(p, Shard)}
            self._global_shape = tuple(param.shape)

        def shard_tensor(
            self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None
        ) -> torch.Tensor | None:
            """As of the base class: of a whole tensor, or of one slice of dim 0 (an expert)."""
            if self._box is None:
                found: torch.Tensor | None = super().shard_tensor(source, tensor_idx, device, dtype)
                return found
            shape = source.shape if isinstance(source, torch.Tensor) else source.get_shape()
            first = self.param_ndim - len(shape) if tensor_idx is not None else 0
            if not self._fits(shape, first):
                if tensor_idx is None:  # one dim too many on every rank: a mismatched key
                    return torch.unsqueeze(source[...], 0)
                raise ValueError(
                    f"fsdp.integrations: expected slices of a parameter of shape "
                    f"{self._global_shape}, got a checkpoint's tensor of shape {tuple(shape)}, "
                    f"which is one of several along a dim that is sharded; load the model without "
                    f"distributed_config, and save it under its present names"
                )
            if first == 1:
                rows, row = self._box[0], cast(int, tensor_idx) % self._global_shape[0]
                if rows.start == rows.stop and row == 0 and shape:
                    return cast(torch.Tensor, source[:0]).to(device=device, dtype=dtype)
                if not rows.start <= row < rows.stop:
                    return None
            box = [
                self._box[dim] if dim in self._sharded_dims else slice(None)
                for dim in range(first, self.param_ndim)
            ]
            part: torch.Tensor = source[tuple(box)].to(device=device, dtype=dtype)
            return part

        def _fits(self, shape: Sequence[int], first: int) -> bool:
            """Whether a checkpoint's tensor has the sizes of the parameter's dims from `first` on.

            Dims that are not sharded may differ: a converter joins several tensors along them.
            """
            wanted = self._global_shape[first:]
            return (
                first in (0, 1)
                and len(shape) == len(wanted)
                and all(
                    shape[dim - first] == wanted[dim - first]
                    for dim in self._sharded_dims
                    if dim >= first
                )
            )

    return RaggedShardOperation


def _assigning_nothing(stock: Any) -> Any:
    """Transformers' assignment of a loaded shard, which may be empty.

    Its converters stack the slices that a rank has (experts); where it has none, the loader gives
    them an empty one, and what they make of it is empty too, in another shape.
    """

    @functools.wraps(stock)
    def set_param_for_module(
        model: nn.Module, name: str, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        held: Any = model
        for key in name.split("."):
            held = getattr(held, key, None)
        if _is_ragged(held) and held._local_tensor.numel() == value.numel() == 0:
            value = value.reshape(held._local_tensor.shape)
        return stock(model, name, value, *args, **kwargs)

    return set_param_for_module


def _is_ragged(value: object) -> bool:
    """Whether a value is a DTensor that this package has sharded."""
    return isinstance(value, DTensor) and any(
        isinstance(placement, RaggedShard) for placement in value.placements
    )


def _checked_gather(stock: Any) -> Any:
    """A check before transformers writes a state dict."""

    @functools.wraps(stock)
    def gather_sharded_state_dict_for_save(
        self: Any,
        model_to_save: Any,
        state_dict: Mapping[str, Any],
        distributed_config: Any,
        **options: Any,
    ) -> Any:
        if distributed_config is None:
            for name, value in state_dict.items():
                if _is_ragged(value):
                    raise ValueError(
                        f"save_pretrained: expected a model that transformers or accelerate has "
                        f"sharded, or a full state_dict=, got {name!r} placed as "
                        f"{value.placements}; shard it by "
                        f"from_pretrained(distributed_config=DistributedConfig(fsdp_size=...)), or "
                        f"gather it on all ranks by get_model_state_dict(model, "
                        f"options=StateDictOptions(full_state_dict=True))"
                    )
        return stock(self, model_to_save, state_dict, distributed_config, **options)

    return gather_sharded_state_dict_for_save
