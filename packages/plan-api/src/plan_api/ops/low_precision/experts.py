"""Experts of mixtures whose products take operands in low precision.

Experts of transformers have the weights of all experts in parameters of three dims, and multiply
tokens by that of one expert at a time, or by all of them in a grouped product. While they run,
`ExpertWeights` takes the place of such a parameter: it has torch's ``__torch_function__`` protocol,
so that products by it are those of `low_precision_linear`, expert by expert, each with scales of
its own. Grouped products run expert by expert too: ``torch._scaled_grouped_mm`` does not run on
CPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from plan_api.ops.low_precision.linear import FeatureGroups, LowPrecision, low_precision_linear

__all__ = [
    "ExpertWeights", "expert_weights", "in_low_precision", "is_experts", "takes_transposes",
]  # fmt: skip


def is_experts(module: nn.Module) -> bool:
    """Whether a module has the experts of a mixture, as those of transformers have them."""
    return hasattr(module, "_is_expert_parallel") and bool(expert_weights(module))


def expert_weights(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters that have a matrix for each expert."""
    own = module.named_parameters(recurse=False)
    return tuple(name for name, param in own if param.ndim == 3 and param.is_floating_point())


def takes_transposes(module: nn.Module) -> bool:
    """Whether experts have weights (E, K, N), as those of GPT-OSS; otherwise they are (E, N, K)."""
    return bool(getattr(module, "is_transposed", False))


@contextmanager
def in_low_precision(
    module: nn.Module, precision: LowPrecision, groups: Mapping[str, FeatureGroups]
) -> Iterator[None]:
    """Makes the products of experts take quantized operands inside of the block.

    Args:
        module: experts, on local tensors.
        precision: the recipe.
        groups: by the name of each parameter.

    Raises:
        ValueError: a parameter is a DTensor.
    """
    swapped: dict[str, Any] = {}
    for name, of_matrix in groups.items():
        weight = getattr(module, name)
        if isinstance(weight, DTensor):
            raise ValueError(
                f"{type(module).__name__}.{name}: expected a local tensor, as experts in low "
                f"precision take, got a DTensor, {weight._spec}; add local(path) for the experts "
                f"to the plan, or leave them out of its precision"
            )
        swapped[name] = ExpertWeights(weight, precision, of_matrix)
    # Attribute lookup finds these first; a local parameter of the plan may be there.
    attributes = module.__dict__
    before = {name: attributes[name] for name in swapped if name in attributes}
    attributes.update(swapped)
    try:
        yield
    finally:
        for name in swapped:
            del attributes[name]
        attributes.update(before)


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The weights of several experts, or the weight of one, in a product in low precision.

    Attributes:
        tensor: (experts, rows, columns), or (rows, columns).
        precision: the recipe.
        groups: those that shard rows and columns.
    """

    tensor: torch.Tensor
    precision: LowPrecision
    groups: FeatureGroups

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self.tensor.device

    def data_ptr(self) -> int:
        """Returns the address of the tensor."""
        return self.tensor.data_ptr()

    def __getitem__(self, expert: Any) -> ExpertWeights:
        return ExpertWeights(self.tensor[expert], self.precision, self.groups)

    def transpose(self, first: int, second: int) -> ExpertWeights:
        """Returns the transposed weights.

        Args:
            first: one of the last two dims.
            second: the other one.
        """
        dims = self.tensor.ndim
        if {first % dims, second % dims} != {dims - 2, dims - 1}:
            raise self._refused(f"transpose({first}, {second})")
        transposed = self.tensor.transpose(first, second)
        groups = FeatureGroups(self.groups.inputs, self.groups.outputs)
        return ExpertWeights(transposed, self.precision, groups)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Multiplies tokens by the weight of one expert, or of all of them in a grouped product."""
        options = {name: value for name, value in (kwargs or {}).items() if value is not None}
        weight = next(one for one in (*args, *options.values()) if isinstance(one, cls))
        if len(args) >= 2 and args[1] is weight and isinstance(args[0], torch.Tensor):
            dims = weight.tensor.ndim
            if func is nn.functional.linear and dims == 2 and len(args) + len(options) <= 3:
                bias = options.pop("bias", None) if len(args) == 2 else args[2]
                return weight._multiply(args[0], bias)
            if func in (torch.Tensor.matmul, torch.matmul, torch.mm) and dims == 2 and not options:
                return weight.transpose(0, 1)._multiply(args[0], None)
            if func is torch._grouped_mm and dims == 3 and set(options) == {"offs"}:
                return weight.transpose(1, 2)._multiply_grouped(args[0], options["offs"])
        raise weight._refused(getattr(func, "__name__", str(func)))

    def _multiply(self, tokens: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the product of tokens (..., columns) and rows."""
        return low_precision_linear(tokens, self.tensor, bias, self.precision, self.groups)

    def _multiply_grouped(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns the products of each expert and its tokens; of tokens of no expert zeros.

        Args:
            tokens: (tokens, columns), in the order of experts.
            offsets: (experts,): behind the last token of each.
        """
        # FakeTensors have no values: their shapes are those of one expert with all tokens.
        is_fake = isinstance(offsets, FakeTensor)
        ends = [len(tokens)] * len(self.tensor) if is_fake else offsets.tolist()
        # Of experts without tokens too: gradients of all of them are zeros then, not missing.
        products = [
            self[number]._multiply(tokens[start:end], None)
            for number, (start, end) in enumerate(itertools.pairwise([0, *ends]))
        ]
        rest = products[0].new_zeros(len(tokens) - ends[-1], self.tensor.shape[1])
        return torch.cat([*products, rest])

    def _refused(self, operation: str) -> ValueError:
        return ValueError(
            f"experts in {self.precision.recipe.name}: expected products by linear, matmul or "
            f"grouped_mm, got {operation}; use experts_implementation='eager' or 'grouped_mm', or "
            f"leave the experts out of the pattern"
        )
