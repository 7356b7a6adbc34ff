"""Products of Linears on local tensors, with the communication beside them, as autograd functions.

In front of Linears (`GatheredProducts`): forward multiplies each rank's rows as they arrive;
backward reduces the gradient of the input while it computes the gradients of the weights. Behind a
Linear (`PartialProduct`, `ReducedProduct`): forward sends rows of the output as they are computed;
backward multiplies the rows of the output's gradient as they arrive.

Only rows are split, so every sum over features is that of the unsplit product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode

from plan_api.ops.autocast import cast_down
from plan_api.ops.overlap.fused import FusedOperators
from plan_api.ops.overlap.rows_in_flight import (
    ArrivingRows,
    BlocksOfTensor,
    RowsInFlight,
    block_lengths,
    rows_of,
)
from plan_api.ops.overlap.transfer import Peers, RowExchange, RowReduction, Transfer
from plan_api.runtime.error_context import StepContext, annotate_backward_errors

__all__ = ["GatheredProducts", "PartialProduct", "Placing", "ReducedProduct"]

_CONTIGUOUS = torch.contiguous_format
# From how many rows on a product of one sequence takes as long as its part of a larger product.
_LONG_BLOCK = 64


@dataclass(frozen=True)
class Placing:
    """What is communicated beside products.

    Attributes:
        peers: the ranks along the axis.
        dim: of the tensor that is gathered or scattered; None: it is summed and stays replicated.
        context: of the site, for errors in backward.
        fused: multiply and communicate in one; None: rows are sent and received.
    """

    peers: Peers
    dim: int | None
    context: StepContext
    fused: FusedOperators | None = None

    def rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the part of each rank of a tensor that is not sharded, as views."""
        assert self.dim is not None
        return tensor.chunk(self.peers.size, self.dim)

    def fused_for(
        self, tensor: torch.Tensor, matrices: Sequence[torch.Tensor]
    ) -> FusedOperators | None:
        """Returns the operators that multiply and communicate in one, if they take the tensors."""
        fused = None if self.dim is None else self.fused
        return fused if fused is not None and fused.take(tensor, matrices) else None

    def begin_sum(self, tensor: torch.Tensor) -> Transfer:
        """Begins to sum a tensor of all ranks."""
        if self.dim is None:
            return self.peers.begin_all_reduce(tensor)
        return self.peers.begin_reduce_scatter(tensor, self.dim)


class GatheredProducts(torch.autograd.Function):
    """Gathers an input, if it is sharded, and multiplies it by the weights of several Linears."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        placing: Placing,
        unused: Sequence[int],
        *params: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns the gathered input, and the output of each Linear.

        Args:
            ctx: of autograd.
            tensor: this rank's, (..., features); it may be `RowsInFlight`, if it is not gathered.
            placing: how it is gathered.
            unused: the numbers of Linears that are not computed, whose outputs are None. Their
                weights are saved all the same: recomputation counts saved tensors.
            params: the weight (out, in) and the bias (out,) or None of each Linear in turn.
        """
        ctx.set_materialize_grads(False)
        weights, biases = params[::2], params[1::2]
        params = _cast(*params)
        used = [number for number in range(len(weights)) if number not in unused]
        if isinstance(tensor, RowsInFlight):
            whole, outputs = _arriving_products(tensor, params, used)
        elif placing.dim is None:
            whole = tensor.view_as(tensor)  # an autograd function may not return its input
            outputs = {number: _product(whole, *params[2 * number :][:2]) for number in used}
        else:
            whole, outputs = _gathered_products(tensor, placing, params, used)
        ctx.save_for_backward(whole, *weights)
        ctx.placing, ctx.at = placing, placing.context
        ctx.has_bias = [bias is not None for bias in biases]
        return whole, *(outputs.get(number) for number in range(len(weights)))

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Reduces the gradient of the input beside those of the weights."""
        whole, *weights = ctx.saved_tensors
        grad_whole, *grad_outputs = grads
        needed, transfer = ctx.needs_input_grad, None
        of_tensor = None
        if needed[0] and grad_whole is None:
            of_tensor = _scattered_grad_of_input(grad_outputs, weights, whole, ctx.placing)
        if needed[0] and of_tensor is None:
            # In autograd's order, which calls backward of the last Linear first.
            terms = [
                _grad_of_input(grad, weight, whole.dtype)
                for grad, weight in zip(reversed(grad_outputs), reversed(weights), strict=True)
                if grad is not None
            ]
            if grad_whole is not None:
                # The sum is computed in place, and this gradient may be that of others, too.
                terms.append(grad_whole if terms else grad_whole.clone(memory_format=_CONTIGUOUS))
            if terms:
                total, *others = terms
                for term in others:
                    total += term
                transfer = ctx.placing.begin_sum(total)
        of_params: list[torch.Tensor | None] = []
        for number, (grad, weight) in enumerate(zip(grad_outputs, weights, strict=True)):
            has_bias = ctx.has_bias[number] and needed[4 + 2 * number]
            of_params += _grads_of_params(grad, whole, weight, needed[3 + 2 * number], has_bias)
        if transfer is not None:
            of_tensor = transfer.wait()
        return of_tensor, None, None, *of_params


def _scattered_grad_of_input(
    grads: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
    whole: torch.Tensor,
    placing: Placing,
) -> torch.Tensor | None:
    """Returns the gradient of a gathered input, by one fused product for all Linears.

    Returns:
        None if there is no such operator.
    """
    pairs = [(grad, one) for grad, one in zip(grads, weights, strict=True) if grad is not None]
    parts = [part for pair in pairs for part in pair]
    fused = placing.fused_for(whole, parts)
    if fused is None:
        return None
    assert placing.dim is not None
    if len(pairs) == 1:
        return fused.scattered(*pairs[0], placing.dim)
    grad, weight = torch.cat([one for one, _ in pairs], -1), torch.cat([one for _, one in pairs])
    return fused.scattered(grad, weight, placing.dim)


def _gathered_products(
    tensor: torch.Tensor,
    placing: Placing,
    params: Sequence[torch.Tensor | None],
    used: Sequence[int],
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Returns the gathered tensor, and its product with each Linear by number."""
    matrices = [params[2 * number].t() for number in used]  # type: ignore[union-attr]
    fused = placing.fused_for(tensor, matrices)
    if fused is not None:
        assert placing.dim is not None
        found = fused.gathered(tensor, matrices, placing.dim)
        for number, product in zip(used, found.products, strict=True):
            bias = params[2 * number + 1]
            if bias is not None:
                product += bias
        return found.whole, dict(zip(used, found.products, strict=True))
    shape, dim = [*tensor.shape], placing.dim
    assert dim is not None
    shape[dim] *= placing.peers.size
    whole, outputs = tensor.new_empty(shape), dict[int, torch.Tensor]()
    for rank, shard in RowExchange(tensor, placing.rows(whole), placing.peers):
        with record_function("overlap: compute"):
            for number in used:
                weight, bias = params[2 * number :][:2]
                assert weight is not None
                if number not in outputs:
                    outputs[number] = weight.new_empty([*shape[:-1], weight.shape[0]])
                _product(shard, weight, bias, placing.rows(outputs[number])[rank])
    return whole, outputs


def _arriving_products(
    tensor: RowsInFlight, params: Sequence[torch.Tensor | None], used: Sequence[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Returns a tensor that has arrived, and its product with each Linear by number.

    The last rows arrive beside the product of others with the largest weight. The other weights
    multiply all rows at once, which costs less.
    """
    weights = {number: weight for number in used if (weight := params[2 * number]) is not None}
    outputs = dict[int, torch.Tensor]()
    if weights:
        first = max(weights, key=lambda number: weights[number].numel())
        output = weights[first].new_empty([*tensor.shape[:-1], weights[first].shape[0]])
        outs = rows_of(output).split(tensor.arriving.lengths)
        for block, out in zip(tensor.in_blocks(), outs, strict=True):
            with record_function("overlap: compute"):
                _product(block, weights[first], params[2 * first + 1], out)
        outputs[first] = output
    whole = tensor.whole().detach()  # other sites may return the same
    for number, weight in weights.items():
        if number not in outputs:
            outputs[number] = _product(whole, weight, params[2 * number + 1])
    return whole, outputs


class PartialProduct(torch.autograd.Function):
    """Multiplies by the weight of one Linear, and sums the result over ranks on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        placing: Placing,
        sums: list[torch.Tensor | ArrivingRows] | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        blocks: int = 1,
    ) -> torch.Tensor:
        """Returns this rank's part of the sum.

        Args:
            ctx: of autograd.
            tensor: this rank's, (..., in).
            placing: how the sum is scattered.
            sums: to which the sum over ranks is appended; None: it is not computed. A sum that
                stays replicated may not have arrived.
            weight: (out, in).
            bias: (out,), or None.
            blocks: of rows, into which a sum that stays replicated is split.
        """
        ctx.save_for_backward(tensor, weight)
        ctx.has_bias, ctx.at = bias is not None, placing.context
        ctx.computed = None  # by `ReducedProduct`
        weight, bias = _cast(weight, bias)
        if sums is None:
            return _product(tensor, weight, bias)
        total: torch.Tensor | ArrivingRows
        if placing.dim is None:
            output, total = _all_reduced_product(tensor, placing, weight, bias, blocks)
        else:
            output, total = _scattered_product(tensor, placing, weight, bias)
        sums.append(total)
        return output

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Returns what `ReducedProduct` has computed, if this is the gradient that it returned."""
        (grad,) = grads
        computed, ctx.computed = ctx.computed, None
        if computed is None:
            computed = _GradOfProduct(*ctx.saved_tensors)
        of_arguments: tuple[Any, ...] = computed.grads(ctx, grad)
        return of_arguments


class ReducedProduct(torch.autograd.Function):
    """Takes a part of a sum, and returns the sum that `PartialProduct` has computed."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, placing: Placing, total: Sequence[torch.Tensor], product: Any
    ) -> torch.Tensor:
        """Returns the sum.

        Args:
            ctx: of autograd.
            part: of `PartialProduct`.
            placing: of `PartialProduct`.
            total: the sum, in a sequence, as an autograd function may not return its input; it may
                be `RowsInFlight`.
            product: the context of `PartialProduct`; None without gradients.
        """
        ctx.placing, ctx.product, ctx.at = placing, product, placing.context
        return total[0]

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Gathers the gradient beside the product that follows from it."""
        (grad,) = grads
        if ctx.placing.dim is None:
            return grad, None, None, None
        # Once: recomputation counts how often saved tensors are asked for.
        computed = _GradOfProduct(*ctx.product.saved_tensors)
        computed.gather(grad, ctx.placing, ctx.product.needs_input_grad[0])
        ctx.product.computed = computed
        return computed.grad_output, None, None, None


class _GradOfProduct:
    """The gradients of a product, of which some may have been computed before they are due."""

    def __init__(self, tensor: torch.Tensor, weight: torch.Tensor) -> None:
        self._tensor, self._weight = tensor, weight
        self._grad_tensor: torch.Tensor | None = None
        self.grad_output: torch.Tensor | None = None

    def gather(self, grad: torch.Tensor, placing: Placing, needs_input_grad: bool) -> None:
        """Gathers the gradient of the output, and multiplies its rows as they arrive."""
        assert placing.dim is not None
        shape = [*grad.shape]
        shape[placing.dim] *= placing.peers.size
        fused = placing.fused_for(grad, [self._tensor, self._weight]) if needs_input_grad else None
        if fused is not None:
            found = fused.gathered(grad, [self._weight], placing.dim)
            self.grad_output, (self._grad_tensor,) = found.whole, found.products
            return
        self.grad_output = grad.new_empty(shape)
        if needs_input_grad:
            self._grad_tensor = torch.empty_like(self._tensor, memory_format=_CONTIGUOUS)
        exchange = RowExchange(grad, placing.rows(self.grad_output), placing.peers)
        for rank, shard in exchange:
            with record_function("overlap: compute"):
                if self._grad_tensor is not None:
                    out = placing.rows(self._grad_tensor)[rank]
                    _grad_of_input(shard, self._weight, self._tensor.dtype, out)

    def grads(self, ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Returns the gradients of the arguments of `PartialProduct`."""
        needed = ctx.needs_input_grad
        of_tensor = None
        if needed[0]:
            # Another gradient arrives where the module uses its part of the sum otherwise, too.
            if grad is self.grad_output:
                of_tensor = self._grad_tensor
            else:
                of_tensor = _grad_of_input(grad, self._weight, self._tensor.dtype)
        has_bias = ctx.has_bias and needed[4]
        of_params = _grads_of_params(grad, self._tensor, self._weight, needed[3], has_bias)
        return of_tensor, None, None, *of_params, None


def _scattered_product(
    tensor: torch.Tensor, placing: Placing, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a product, and this rank's rows of its sum over ranks."""
    fused = placing.fused_for(tensor, [weight]) if bias is None else None
    if fused is not None:
        assert placing.dim is not None
        return _product_if_used(tensor, weight), fused.scattered(tensor, weight.t(), placing.dim)
    reduction = RowReduction(placing.peers)
    output = weight.new_empty([*tensor.shape[:-1], weight.shape[0]])
    rows, products = placing.rows(tensor), placing.rows(output)
    for rank in reduction.destinations():
        with record_function("overlap: compute"):
            reduction.send(_product(rows[rank], weight, bias, products[rank]))
    own = placing.peers.rank
    with record_function("overlap: compute"):
        _product(rows[own], weight, bias, products[own])
    return output, reduction.sum(products[own])


def _product_if_used(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns a product that is computed at its first use, which is none in most modules."""
    output = weight.new_empty([*tensor.shape[:-1], weight.shape[0]])
    lengths = block_lengths(output, 1)
    rows = BlocksOfTensor(tensor.contiguous(), lengths)
    return RowsInFlight(
        ArrivingRows(
            [output], lengths, lambda number: _product(rows(number), weight, None, rows_of(output))
        )
    )


def _all_reduced_product(
    tensor: torch.Tensor,
    placing: Placing,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    count: int,
) -> tuple[torch.Tensor, ArrivingRows]:
    """Returns a product, and its sum over ranks, which arrives in blocks of rows."""
    output = weight.new_empty([*tensor.shape[:-1], weight.shape[0]])
    total = torch.empty_like(output)
    rows = tensor.reshape(-1, tensor.shape[-1])
    lengths, transfers = block_lengths(output, count), list[Transfer]()
    blocks = (one.split(lengths) for one in (rows, rows_of(output), rows_of(total)))
    for block, product, sent in zip(*blocks, strict=True):
        with record_function("overlap: compute"):
            sent.copy_(_product(block, weight, bias, product))
        transfers.append(placing.peers.begin_all_reduce(sent))
    return output, ArrivingRows([total], lengths, lambda number: transfers[number].wait())


def _cast(*params: Any) -> Any:
    """Casts parameters to the dtype of autocast, once for all rows."""
    return tuple(None if param is None else cast_down(param)[0] for param in params)


def _product(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes a Linear; into a view, if one is given, which is returned then."""
    assert weight is not None
    return _multiplied(cast_down(tensor)[0], weight.t(), bias, out)


def _grad_of_input(
    grad: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes the gradient of a Linear's input, as `_product`."""
    weight = weight.to(grad.dtype)
    if out is not None and dtype != grad.dtype:
        return out.copy_(_multiplied(grad, weight, None, None))
    return _multiplied(grad, weight, None, out).to(dtype)


def _multiplied(
    tensor: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Multiplies all rows in one product, or those of each sequence in the place of the result."""
    if out is not None and _has_long_blocks(out):
        rows, outs = ((tensor,), (out,)) if out.ndim == 2 else (tensor.unbind(), out.unbind())
        for one, target in zip(rows, outs, strict=True):
            if bias is None:
                torch.mm(one, matrix, out=target)
            else:
                torch.addmm(bias, one, matrix, out=target)
        return out
    flat = tensor.reshape(-1, tensor.shape[-1])
    product = flat.mm(matrix) if bias is None else torch.addmm(bias, flat, matrix)
    product = product.view(*tensor.shape[:-1], product.shape[-1])
    return product if out is None else out.copy_(product)


def _has_long_blocks(out: torch.Tensor) -> bool:
    """Whether products are computed in place, which saves copying them.

    Selective recomputation caches products by their operators, of which those with ``out=`` are
    none.
    """
    if _get_current_dispatch_mode() is not None or not 2 <= out.ndim <= 3:
        return False
    blocks_are_dense = out.stride()[-2:] == (out.shape[-1], 1)
    return blocks_are_dense and (out.shape[-2] >= _LONG_BLOCK or out[..., 0, 0].numel() == 1)


def _grads_of_params(
    grad: torch.Tensor | None,
    tensor: torch.Tensor,
    weight: torch.Tensor,
    needs_weight: bool,
    needs_bias: bool,
) -> list[torch.Tensor | None]:
    """Returns the gradients of a weight and its bias; None for those that are not needed."""
    if grad is None:
        return [None, None]
    rows = grad.reshape(-1, grad.shape[-1])
    of_weight = None
    if needs_weight:
        flat = tensor.reshape(-1, tensor.shape[-1]).to(grad.dtype)
        of_weight = rows.t().mm(flat).to(weight.dtype)
    return [of_weight, rows.sum(0).to(weight.dtype) if needs_bias else None]
