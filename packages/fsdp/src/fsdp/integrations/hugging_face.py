"""Makes Hugging Face's accelerate and transformers call this package's `fully_shard`."""

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
from fsdp.integrations.versions import check_version
from ragged_shard import RaggedShard

__all__ = ["install", "uninstall"]


@dataclass(frozen=True)
class _Attribute:
    """An attribute of a module or class, and a value for it."""

    owner: Any
    name: str
    value: Any


_originals: list[_Attribute] = []  # that `install` has replaced


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
      calls this package's `fully_shard`, with slices of dim 0 on one rank each and tied weights in
      one call, and lets the model's ``load_state_dict`` take whole tensors, which the Trainer
      passes when it resumes and for the best model;
    - ``DtensorShardOperation`` of ``transformers.core_model_loading``, by a subclass that reads
      from a checkpoint the rows that a rank has under a `RaggedShard`; and
      ``set_param_for_module`` there, for ranks that have no rows;
    - ``DistributedMixin.gather_sharded_state_dict_for_save`` of transformers, by one that raises
      for a sharded model that transformers does not know to be sharded, which it would write from
      one rank while the others wait.

    What is in transformers is replaced only where it is installed. Versions of accelerate and
    transformers that were not tested are a warning, once.

    Raises:
        RuntimeError: this version of transformers lacks one of these.
    """
    if _originals:
        return
    replacements = [
        _Attribute(torch_fsdp, "fully_shard", _with_state(torch_fsdp.fully_shard)),
        _Attribute(
            torch_fsdp, "register_fsdp_forward_method", api.register_fsdp_forward_method
        ),
    ]  # fmt: skip
    for framework in ("accelerate", "transformers"):
        check_version(framework)
    if importlib.util.find_spec("transformers") is not None:
        replacements += _transformers_replacements()
    for new in replacements:
        _originals.append(_Attribute(new.owner, new.name, getattr(new.owner, new.name)))
        setattr(new.owner, new.name, new.value)


def uninstall() -> None:
    """Restores what `install` replaced; sharded models stay as they are."""
    while _originals:
        original = _originals.pop()
        setattr(original.owner, original.name, original.value)


def _with_state(native: Any) -> Any:
    """Returns this package's `fully_shard` with ``fully_shard.state``, which pipelines call."""

    @functools.wraps(api.fully_shard)
    def fully_shard(*args: Any, **kwargs: Any) -> Any:
        return api.fully_shard(*args, **kwargs)

    fully_shard.state = native.state  # type: ignore[attr-defined]
    return fully_shard


def _transformers_replacements() -> list[_Attribute]:
    """Returns the replacements in transformers.

    Raises:
        RuntimeError: this version lacks one of them.
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
        _Attribute(mixin, apply.__name__, _with_tied_weights(sharding, apply)),
        _Attribute(loading, read.__name__, _ragged_operation(read)),
        _Attribute(loading, assign.__name__, _with_empty_shards(assign)),
        _Attribute(mixin.DistributedMixin, gather.__name__, _checked_gather(gather)),
    ]


def _with_tied_weights(sharding: Any, native: Any) -> Any:
    """Returns transformers' sharding of a model, which calls `_shard_with_tied`."""

    @functools.wraps(native)
    def apply(model: Any, *args: Any, **kwargs: Any) -> Any:
        # Transformers ties weights only after loading; then one parameter would be in two groups.
        model.tie_weights(recompute_mapping=False)
        owners: dict[nn.Parameter, list[nn.Module]] = {}
        for module in model.modules():
            for param in module.parameters(recurse=False):
                owners.setdefault(param, []).append(module)
        original = sharding.fully_shard
        sharding.fully_shard = functools.partial(_shard_with_tied, owners)
        try:
            sharded = native(model, *args, **kwargs)
        finally:
            sharding.fully_shard = original
        # The Trainer loads whole tensors when it resumes, and the best model.
        model.register_load_state_dict_pre_hook(_shard_whole_tensors)
        return sharded

    return apply


def _shard_with_tied(
    owners: Mapping[nn.Parameter, Sequence[nn.Module]],
    module: nn.Module | Sequence[nn.Module],
    **options: Any,
) -> Any:
    """Shards modules together with other modules that have one of their parameters.

    Each rank has slices of dim 0, as the loader of checkpoints reads them.

    Args:
        owners: of each parameter, the modules that it is registered on.
        module: one or several.
        options: of `fully_shard`.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    # A parameter that an earlier call has sharded is another object now, with no owners.
    tied = [
        owner
        for module in modules
        for param in module.parameters()
        for owner in owners.get(param, ())
    ]
    inner = {child for module in modules for child in module.modules()}
    joined = [*modules, *dict.fromkeys(one for one in tied if one not in inner)]
    return api.fully_shard(
        joined[0] if len(joined) == 1 else joined,
        shard_placement_fn=lambda param: Shard(0) if param.ndim else None,
        **options,
    )


def _local_slices(param: DTensor) -> tuple[slice, ...]:
    """Returns which part of a sharded parameter this rank has, a slice for each dim."""
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def _shard_whole_tensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Replaces whole tensors, which every rank has, by DTensors of the parameters' placements.

    It is a pre-hook of `load_state_dict`, and communicates nothing. Tensors of another shape are
    left for the errors of `load_state_dict`.
    """
    for name, param in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if not _is_ragged(param) or not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, DTensor) or value.shape != param.shape:
            continue
        sharded: Any = param.data
        local = value[_local_slices(sharded)].to(sharded.to_local()).contiguous()
        state_dict[prefix + name] = DTensor.from_local(
            local,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )


def _ragged_operation(native: Any) -> Any:
    """Returns a subclass of transformers' DtensorShardOperation that reads ragged shards."""
    return type("RaggedShardOperation", (_RaggedShardReader, native), {})


class _RaggedShardReader:
    """Reads a rank's slice of a checkpoint's tensor: its rows, and its columns under TP.

    It is a mixin in front of transformers' DtensorShardOperation, which reads other DTensors.
    """

    device_mesh: Any
    placements: Any
    param_ndim: int

    def __init__(self, param: DTensor) -> None:
        base: Any = super()
        base.__init__(param)
        self._slices: tuple[slice, ...] | None = None
        if not _is_ragged(param):
            return
        self._slices = _local_slices(param)
        self._sharded_dims = {0} | {p.dim for p in self.placements if isinstance(p, Shard)}
        self._global_shape = tuple(param.shape)

    def shard_tensor(
        self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None
    ) -> torch.Tensor | None:
        """Reads from a whole tensor, or from one slice of dim 0 (an expert)."""
        if self._slices is None:
            base: Any = super()
            tensor: torch.Tensor | None = base.shard_tensor(source, tensor_idx, device, dtype)
            return tensor
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
            rows, row = self._slices[0], cast(int, tensor_idx) % self._global_shape[0]
            if rows.start == rows.stop and row == 0 and shape:
                return cast(torch.Tensor, source[:0]).to(device=device, dtype=dtype)
            if not rows.start <= row < rows.stop:
                return None
        slices = [
            self._slices[dim] if dim in self._sharded_dims else slice(None)
            for dim in range(first, self.param_ndim)
        ]
        part: torch.Tensor = source[tuple(slices)].to(device=device, dtype=dtype)
        return part

    def _fits(self, shape: Sequence[int], first: int) -> bool:
        """Returns whether a checkpoint's tensor has the parameter's sizes from dim `first` on.

        Dims that are not sharded may differ: a converter concatenates several tensors along them.
        """
        sizes = self._global_shape[first:]
        return (
            first in (0, 1)
            and len(shape) == len(sizes)
            and all(
                shape[dim - first] == sizes[dim - first]
                for dim in self._sharded_dims
                if dim >= first
            )
        )


def _with_empty_shards(native: Any) -> Any:
    """Returns transformers' assignment of a loaded shard, for empty shards of any shape.

    Its converters stack the slices that a rank has (experts); where a rank has none, the loader
    passes an empty one, and the result is empty too, in another shape.
    """

    @functools.wraps(native)
    def set_param_for_module(
        model: nn.Module, name: str, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        param: Any = model
        for key in name.split("."):
            param = getattr(param, key, None)
        if _is_ragged(param) and param._local_tensor.numel() == value.numel() == 0:
            value = value.reshape(param._local_tensor.shape)
        return native(model, name, value, *args, **kwargs)

    return set_param_for_module


def _is_ragged(value: object) -> bool:
    """Returns whether a value is a DTensor with a RaggedShard placement."""
    return isinstance(value, DTensor) and any(
        isinstance(placement, RaggedShard) for placement in value.placements
    )


def _checked_gather(native: Any) -> Any:
    """Returns transformers' gather of a state dict before saving, with a check in front."""

    @functools.wraps(native)
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
        return native(self, model_to_save, state_dict, distributed_config, **options)

    return gather_sharded_state_dict_for_save
