"""Sequences that ranks quantize before they gather them, as operands of products."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad

from plan_api.ops.low_precision.operand_tensor import OperandTensor
from plan_api.ops.low_precision.quantize import Quantized, amax_of, quantize, scales_of
from plan_api.ops.low_precision.recipes import Recipe, Scaling
from plan_api.runtime.hooks import is_validating

__all__ = ["GatheredColumns", "QuantizedTokens", "TokenGather"]

_log = logging.getLogger("plan_api")


class TokenGather:
    """How the ranks of a group gather a sequence in front of linear layers of one recipe.

    Each rank quantizes its tokens, and float8 elements and scales are gathered, in one collective.
    Operands have the bits of quantizing the gathered sequence.

    Args:
        what: names the site, for messages.
        recipe: of the linear layers.
        group: the ranks that shard the sequence, evenly.
        dim: of the sequence in the tensor.
    """

    def __init__(self, what: str, recipe: Recipe, group: dist.ProcessGroup, dim: int) -> None:
        self.recipe, self.dim, self.ranks = recipe, dim, group.size()
        self._what, self._group = what, group
        self._is_used_otherwise = False

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a shard is gathered so, which all ranks decide alike.

        Both modes gather in the dtype of compute while they are compared, and so do graphs, and
        sites whose tensor something else than a linear layer of the recipe has used.
        """
        return not (
            self._is_used_otherwise
            or is_validating()
            or torch.compiler.is_compiling()
            or isinstance(tensor, (FakeTensor, QuantizedTokens))
            or not tensor.is_floating_point()
            or not 0 <= self.dim < tensor.ndim - 1
            or not tensor.numel()
        )

    def __call__(self, shard: torch.Tensor) -> QuantizedTokens:
        """Returns the sequence of all ranks, whose operands linear layers take.

        Args:
            shard: this rank's, (..., features).
        """
        device, dtype = shard.device.type, shard.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        shape = [*shard.shape]
        shape[self.dim] *= self.ranks
        operands = _Operands(self, shard.detach(), shard.detach().to(dtype), GatheredColumns(self))
        operands.rows()  # before the module runs: all ranks gather in the order of sites
        return QuantizedTokens(shape, shard.dtype, shard.device, operands)

    def rows(self, shard: torch.Tensor) -> Quantized:
        """Returns the gathered tokens (M, K), quantized as the left operand of the output.

        Args:
            shard: this rank's, (..., K).
        """
        scaling = self.recipe.output.left
        tokens = shard.reshape(-1, shard.shape[-1])
        amax = amax_of(tokens, scaling)
        if scaling.is_tensorwise:
            self._reduce(amax)
        own = quantize(tokens, scaling, scales_of(amax, scaling))
        if scaling.is_tensorwise:
            (data,) = self._gather(shard, own.data)
            return Quantized(data, own.scales, scaling)
        data, scales = self._gather(shard, own.data, own.scales.to(_dtype_of_scales(scaling)))
        return Quantized(data, scales.float(), scaling)

    def columns(self, shard: torch.Tensor) -> Quantized:
        """Returns the gathered, transposed tokens (K, M): the right operand of the weight's grad.

        Scales of blocks of tokens that are a rank's own are gathered; the magnitudes of others are
        reduced.

        Args:
            shard: this rank's, (..., K).
        """
        scaling = self.recipe.grad_weight.right
        tokens = shard.reshape(-1, shard.shape[-1])
        if scaling.inner is not None and not self._run(shard) % scaling.inner:
            own = quantize(tokens.t(), scaling, scales_of(amax_of(tokens.t(), scaling), scaling))
            scales = own.scales.t().to(_dtype_of_scales(scaling))
            data, scales = self._gather(shard, own.data.t(), scales)
            return Quantized(data.t().contiguous(), scales.float().t().contiguous(), scaling)
        if scaling.inner is not None:  # blocks of several ranks: each adds its tokens to zeros
            tokens = self._among_zeros(shard)
        amax = amax_of(tokens.t(), scaling)
        self._reduce(amax)
        scales = scales_of(amax, scaling)
        own_data = quantize(tokens.t(), scaling, scales).data.t()
        if scaling.inner is not None:
            own_data = self._own(own_data[: len(tokens)], shard)
        (data,) = self._gather(shard, own_data)
        missing = -len(data) % (scaling.inner or 1)
        if missing:  # as bytes: no fill for float8 on CPUs
            data = pad(data.view(torch.uint8), (0, 0, 0, missing)).view(scaling.dtype)
        return Quantized(data.t().contiguous(), scales, scaling)

    def plain(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns the gathered sequence in its dtype, which is logged once.

        Args:
            shard: this rank's, (..., K).
        """
        if not self._is_used_otherwise:
            self._is_used_otherwise = True
            _log.warning(
                "%s: something else than a linear layer of %s uses the gathered sequence, so it is "
                "gathered in %s from now on", self._what, self.recipe, shard.dtype,
            )  # fmt: skip
        shape = [*shard.shape]
        shape[self.dim] *= self.ranks
        (tokens,) = self._gather(shard, shard.reshape(-1, shard.shape[-1]))
        return tokens.reshape(shape)

    def _run(self, shard: torch.Tensor) -> int:
        """Returns the number of consecutive tokens that are of one rank."""
        return math.prod(shard.shape[self.dim : -1])

    def _reduce(self, amax: torch.Tensor) -> None:
        dist.all_reduce(amax, dist.ReduceOp.MAX, self._group)

    def _among_zeros(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns tokens (M, K) of the gathered sequence, zero where they are other ranks'."""
        features = shard.shape[-1]
        zeros = shard.new_zeros(self.ranks * shard.numel() // features, features)
        self._own(zeros, shard).copy_(shard.reshape(-1, self._run(shard), features))
        return zeros

    def _own(self, tokens: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the gathered sequence (M, K), as a view of three dims."""
        parts = tokens.view(-1, self.ranks, self._run(shard), shard.shape[-1])
        return parts[:, self._group.rank()]

    def _gather(self, shard: torch.Tensor, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Gathers rows for each token, or each block of tokens, in one collective of bytes.

        Args:
            shard: this rank's part of the sequence.
            parts: (rows, columns) each, with as many rows for each token.

        Returns:
            (rows of all ranks, columns) each, in the order of the gathered sequence.
        """
        outer = math.prod(shard.shape[: self.dim])
        flat = [one.contiguous().view(torch.uint8).flatten() for one in parts]
        sent = flat[0] if len(flat) == 1 else torch.cat(flat)
        ops = torch.ops._c10d_functional
        received = ops.wait_tensor(
            ops.all_gather_into_tensor(sent, self.ranks, self._group.group_name)
        )
        gathered = received.view(self.ranks, -1).split([len(one) for one in flat], 1)
        return [
            bytes_.contiguous()
            .view(part.dtype)
            .view(self.ranks, outer, -1, part.shape[-1])
            .movedim(0, 1)
            .reshape(-1, part.shape[-1])
            for bytes_, part in zip(gathered, parts, strict=True)
        ]


def _dtype_of_scales(scaling: Scaling) -> torch.dtype:
    """Returns in which dtype scales are sent; powers of two need no more than a byte."""
    return torch.float32 if scaling.scales == "float32" else torch.float8_e8m0fnu


class GatheredColumns:
    """The operand of the weight's gradient, which layers that multiply one sequence share.

    It is gathered in backward, by the first layer that needs it, and freed by the last.

    Args:
        gather: of the sequence.
    """

    def __init__(self, gather: TokenGather) -> None:
        self._gather, self._users = gather, 0
        self._found: Quantized | None = None

    def expect(self) -> None:
        """Counts a layer that will call `take`."""
        self._users += 1

    def take(self, shard: torch.Tensor) -> Quantized:
        """Returns the operand of this rank's shard (..., K), in the dtype of compute."""
        found = self._found
        if found is None:
            found = self._gather.columns(shard)
        self._users -= 1
        self._found = found if self._users > 0 else None
        return found


@dataclass
class _Operands:
    """The operands of one sequence, which its aliases share.

    Attributes:
        gather: how it is gathered.
        shard: this rank's, as the plan's site got it.
        cast: the same in the dtype of compute.
        columns: of backward.
    """

    gather: TokenGather
    shard: torch.Tensor
    cast: torch.Tensor
    columns: GatheredColumns
    _rows: Quantized | None = field(default=None, init=False)
    _plain: torch.Tensor | None = field(default=None, init=False)

    def rows(self) -> Quantized:
        """Returns the left operand of the output."""
        if self._rows is None:
            self._rows = self.gather.rows(self.cast)
        return self._rows

    def plain(self) -> torch.Tensor:
        """Returns the sequence in the dtype of the shard."""
        if self._plain is None:
            self._plain = self.gather.plain(self.shard)
        return self._plain


class QuantizedTokens(OperandTensor):
    """A gathered sequence (..., K) of which there are only operands of products.

    An operator that takes no operands gathers the sequence in its dtype, once.
    """

    operands: _Operands

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Returns its shape, dtype and recipe."""
        return f"QuantizedTokens({tuple(self.shape)}, {self.dtype}, {self.operands.gather.recipe})"

    def serves(self, recipe: Recipe) -> bool:
        """Whether layers of a recipe that compute in this dtype take the operands."""
        own = self.operands.gather.recipe
        return self.keeps_operands(self.dtype) and (own.output, own.grad_weight) == (
            recipe.output,
            recipe.grad_weight,
        )

    def keeps_operands(self, dtype: torch.dtype) -> bool:
        """Implements `OperandTensor`: they are of the dtype of compute."""
        return dtype == self.operands.cast.dtype

    def plain(self) -> torch.Tensor:
        """Implements `OperandTensor`."""
        return self.operands.plain().to(self.dtype)
