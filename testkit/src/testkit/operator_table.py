"""The table of operators that tests of DTensor dispatch run through, by kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from testkit.operators import FLOATS, Operand, Operator

_ALL = (*FLOATS, torch.int64)


def _of(*shapes: tuple[int, ...]) -> tuple[Operand, ...]:
    return tuple(Operand(shape) for shape in shapes)


_M = (8, 4)  # even on four ranks and on two by two
_ODD = (7, 6)  # 2, 2, 2, 1 rows and 2, 2, 2, 0 columns
_ONE, _TWO, _THREE = _of(_M), _of(_M, _M), _of(_M, _M, _M)
_CUBE = _of((4, 8, 4))
_MASK = Operand(_M, torch.bool)
_ROWS = Operand((8,), torch.int64, below=8)


def _out(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """The out= variant: the first operand is written to."""
    return lambda out, *operands: function(*operands, *args, out=out)


def _adamw(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """One fused AdamW step of one parameter: parameter, gradient, two averages, step."""
    param, grad, average, square, step = tensors
    torch._fused_adamw_(
        [param], [grad], [average], [square.abs_()], [], [step], lr=0.1, beta1=0.9, beta2=0.99,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return [param]


def _foreach(name: str, *args: Any, returns: bool = False) -> Callable[..., Any]:
    """A foreach operator on its operands: halves are its lists where it takes two."""
    function = getattr(torch, f"_foreach_{name}")

    def run(*operands: torch.Tensor) -> Any:
        half = len(operands) // 2
        result = function(list(operands[:half]), list(operands[half:]), *args)
        return result if returns else list(operands[:half])

    return run


_POINTWISE = (
    Operator("neg", torch.neg, _ONE, _ALL),
    Operator("abs", torch.abs, _ONE, _ALL),
    Operator("exp", torch.exp, _ONE),
    Operator("log", torch.log, _ONE),
    Operator("rsqrt", torch.rsqrt, _ONE),
    Operator("tanh", torch.tanh, _ONE),
    Operator("sigmoid", torch.sigmoid, _ONE),
    Operator("relu", torch.relu, _ONE),
    Operator("silu", F.silu, _ONE),
    Operator("gelu", F.gelu, _ONE),
    Operator("gelu tanh", functools.partial(F.gelu, approximate="tanh"), _ONE),
    Operator("pow scalar", lambda x: x.pow(2), _ONE, _ALL),
    Operator("clamp", lambda x: x.clamp(-1, 2), _ONE, _ALL),
    Operator("add", torch.add, _TWO, _ALL),
    Operator("add odd", torch.add, _of(_ODD, _ODD)),
    Operator("add alpha", lambda x, y: torch.add(x, y, alpha=2), _TWO),
    Operator("add of a row", torch.add, _of(_M, (4,))),
    Operator("add of a column", torch.add, _of(_M, (8, 1))),
    Operator("add of a scalar tensor", torch.add, _of(_M, ())),
    Operator("sub", torch.sub, _TWO, _ALL),
    Operator("mul", torch.mul, _TWO, _ALL),
    Operator("div", torch.div, _TWO, _ALL),
    Operator("add scalar", lambda x: x + 2, _ONE, _ALL),
    Operator("sub from scalar", lambda x: 2 - x, _ONE, _ALL),
    Operator("mul scalar", lambda x: x * 2.5, _ONE, _ALL),
    Operator("mul scalar odd", lambda x: x * 2.5, _of(_ODD)),
    Operator("div scalar", lambda x: x / 3, _ONE, _ALL),
    Operator("maximum", torch.maximum, _TWO),
    Operator("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), _THREE),
    Operator("lerp", lambda x, y: torch.lerp(x, y, 0.25), _TWO),
    Operator("gt scalar", lambda x: x > 0, _ONE, _ALL),
    Operator("eq", torch.eq, _TWO, _ALL),
    Operator("logical_not", torch.logical_not, (_MASK,), (torch.float32,)),
    Operator("isnan", torch.isnan, _ONE),
    Operator("where", torch.where, (_MASK, *_TWO), _ALL),
    Operator("where scalar", lambda m, x: torch.where(m, x, 0.0), (_MASK, *_ONE)),
    Operator("masked_fill", lambda x, m: x.masked_fill(m, -1.0), (*_ONE, _MASK)),
    Operator("to dtype", lambda x: x.to(torch.float64), _ONE, _ALL),
    Operator("clone", torch.clone, _ONE, _ALL),
    Operator("contiguous of t", lambda x: x.t().contiguous(), _ONE),
    Operator("chain of views", lambda x: (x.t() * 2).t().unsqueeze(0) + 1, _ONE),
)
_IN_PLACE = (
    Operator("add_", lambda x, y: x.add_(y), _TWO, _ALL, mutates=1),
    Operator("mul_ scalar", lambda x: x.mul_(2), _ONE, _ALL, mutates=1),
    Operator("addcdiv_", lambda x, y, z: x.addcdiv_(y, z, value=-0.1), _THREE, mutates=1),
    Operator("relu_", torch.relu_, _ONE, mutates=1),
    Operator("zero_", torch.zero_, _ONE, _ALL, mutates=1),
    Operator("fill_", lambda x: x.fill_(3), _ONE, _ALL, mutates=1),
    Operator("copy_", lambda x, y: x.copy_(y), _TWO, _ALL, mutates=1),
    Operator("copy_ of a row", lambda x, y: x.copy_(y), _of(_M, (4,)), mutates=1),
    Operator("masked_fill_", lambda x, m: x.masked_fill_(m, 2), (*_ONE, _MASK), mutates=1),
    Operator("add_ to a view", lambda x: x.view(2, 4, 4).add_(1), _ONE, mutates=1),
    Operator("add_ to t", lambda x: x.t().add_(1), _ONE, mutates=1),
    Operator("add out=", _out(torch.add), _THREE, mutates=1),
    Operator("mul out=", _out(torch.mul), _THREE, mutates=1),
    Operator("neg out=", _out(torch.neg), _TWO, mutates=1),
    Operator(
        "mm out=",
        _out(torch.mm),
        tuple(Operand(shape, fixed="R") for shape in ((8, 8), _M, (4, 8))),
        mutates=1,
    ),
)
_REDUCTIONS = (
    Operator("sum", torch.sum, _ONE, _ALL),
    Operator("sum odd", torch.sum, _of(_ODD)),
    Operator("sum dim", lambda x: x.sum(0), _ONE, _ALL),
    Operator("sum keepdim", lambda x: x.sum(-1, keepdim=True), _ONE),
    Operator("sum dtype", lambda x: x.sum(1, dtype=torch.float64), _ONE),
    Operator("mean", torch.mean, _ONE),
    Operator("mean dim", lambda x: x.mean(-1, keepdim=True), _ONE),
    Operator("amax", lambda x: x.amax(1), _ONE),
    Operator("max", torch.max, _ONE, _ALL),
    Operator("max dim", lambda x: x.max(0), _ONE),
    Operator("all", torch.all, (_MASK,), (torch.float32,)),
    Operator("any", torch.any, (_MASK,), (torch.float32,)),
    Operator("var", lambda x: x.var(-1), _ONE),
    Operator("norm", torch.linalg.vector_norm, _ONE),
    Operator("argmax", lambda x: x.argmax(0), _ONE),
    Operator("cumsum", lambda x: x.cumsum(0), _ONE, _ALL),
    Operator("logsumexp", lambda x: x.logsumexp(1), _ONE),
    Operator("item", lambda x: x.item(), _of(()), _ALL),
    Operator("equal", torch.equal, _TWO, _ALL),
    Operator("topk", lambda x: x.topk(2, dim=1), _ONE),
    Operator("sort", lambda x: x.sort(dim=0), _ONE),
)
_PRODUCTS = (
    Operator("mm", torch.mm, _of(_M, (4, 8))),
    Operator("mm odd", torch.mm, _of(_ODD, (6, 7))),
    Operator("mm of t", lambda x, y: x @ y.t(), _TWO),
    Operator("mv", torch.mv, _of(_M, (4,))),
    Operator("dot", torch.dot, _of((8,), (8,))),
    Operator("bmm", torch.bmm, _of((4, 8, 4), (4, 4, 8))),
    Operator("addmm", torch.addmm, _of((8,), _M, (4, 8))),
    Operator("baddbmm", torch.baddbmm, _of((4, 8, 8), (4, 8, 4), (4, 4, 8))),
    Operator("matmul of 4 dims", torch.matmul, _of((2, 4, 8, 4), (2, 4, 4, 8))),
    Operator("linear", F.linear, _of((4, 8, 4), (8, 4))),
    Operator("linear bias", F.linear, _of((4, 8, 4), (8, 4), (8,))),
    Operator("einsum", lambda x, y: torch.einsum("bsd,ed->bse", x, y), _of((4, 8, 4), (8, 4))),
)
_VIEWS = (
    Operator("view", lambda x: x.view(32), _ONE, _ALL),
    Operator("view of another rank", lambda x: x.view(2, 4, 4), _ONE),
    Operator("view as it is", lambda x: x.view(8, 4), _ONE),
    Operator("reshape odd", lambda x: x.reshape(7, 2, 3), _of(_ODD)),
    Operator("reshape of t", lambda x: x.t().reshape(2, 2, 8), _ONE),
    Operator("flatten", lambda x: x.flatten(0, 1), _CUBE),
    Operator("unflatten", lambda x: x.unflatten(0, (4, 2)), _ONE),
    Operator("t", torch.t, _ONE, _ALL),
    Operator("t odd", torch.t, _of(_ODD)),
    Operator("transpose", lambda x: x.transpose(-1, 0), _CUBE, _ALL),
    Operator("permute", lambda x: x.permute(2, 0, 1), _CUBE),
    Operator("slice", lambda x: x[2:6], _ONE, _ALL),
    Operator("slice step", lambda x: x[:, ::2], _ONE),
    Operator("slice all", lambda x: x[:], _ONE),
    Operator("narrow", lambda x: x.narrow(1, 1, 2), _ONE),
    Operator("select", lambda x: x[1], _ONE, _ALL),
    Operator("unsqueeze", lambda x: x.unsqueeze(0), _ONE, _ALL),
    Operator("squeeze", lambda x: x.squeeze(), _of((1, 8, 1, 4))),
    Operator("squeeze dim", lambda x: x.squeeze(0), _of((1, 8))),
    Operator("expand", lambda x: x.expand(4, 8, 4), _ONE),
    Operator("expand of one", lambda x: x.expand(-1, 4), _of((8, 1))),
    Operator("split", lambda x: x.split(2, 1), _ONE),
    Operator("split sizes", lambda x: x.split([3, 5]), _ONE),
    Operator("chunk", lambda x: x.chunk(2, -1), _ONE, _ALL),
    Operator("unbind", torch.unbind, _ONE),
    Operator("detach", torch.detach, _ONE, _ALL),
    Operator("alias", torch.ops.aten.alias.default, _ONE),
    Operator("view_as", lambda x, y: x.view_as(y), _TWO),
    Operator("diagonal", torch.diagonal, _of((8, 8))),
)
_JOINS = (
    Operator("cat", lambda x, y: torch.cat([x, y], 0), _TWO, _ALL),
    Operator("cat last", lambda x, y: torch.cat([x, y], -1), _TWO),
    Operator("cat odd", lambda x, y: torch.cat([x, y], 1), _of(_ODD, _ODD)),
    Operator("cat of three", lambda *xs: torch.cat(xs), _THREE),
    Operator("stack", lambda x, y: torch.stack([x, y]), _TWO),
    Operator("repeat", lambda x: x.repeat(2, 1), _ONE),
    Operator("repeat_interleave", lambda x: x.repeat_interleave(2, 1), _ONE),
    Operator("pad", lambda x: F.pad(x, (1, 1)), _ONE),
    Operator("flip", lambda x: x.flip(0), _ONE),
    Operator("roll", lambda x: x.roll(1, 0), _ONE),
    Operator("triu", torch.triu, _of((8, 8))),
)
_LAYERS = (
    Operator("softmax", lambda x: x.softmax(-1), _ONE),
    Operator("softmax of rows", lambda x: x.softmax(0), _ONE),
    Operator("log_softmax", lambda x: x.log_softmax(-1), _ONE),
    Operator("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), _of((2, 8, 4), (4,), (4,))),
    Operator("layer_norm bare", lambda x: F.layer_norm(x, (4,)), _ONE),
    Operator("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), _of((2, 8, 4), (4,))),
    Operator(
        "rms_norm of LLaMA",
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        _of((2, 8, 4), (4,)),
    ),
    Operator("nll_loss", F.nll_loss, (*_ONE, Operand((8,), torch.int64, below=4))),
    Operator("cross_entropy", F.cross_entropy, (*_ONE, Operand((8,), torch.int64, below=4))),
    Operator("mse_loss", F.mse_loss, _TWO),
    Operator("embedding", lambda i, w: F.embedding(i, w), (_ROWS, *_ONE)),
    Operator(
        "embedding odd",
        lambda i, w: F.embedding(i, w),
        (Operand((2, 3), torch.int64, below=7), *_of(_ODD)),
    ),
    Operator(
        "sdpa",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        _of((2, 4, 8, 4), (2, 4, 8, 4), (2, 4, 8, 4)),
    ),
    Operator("dropout in eval", lambda x: F.dropout(x, 0.5, training=False), _ONE),
)
_INDEXING = (
    Operator("index rows", lambda x, i: x[i], (*_ONE, _ROWS)),
    Operator("index_select", lambda x, i: x.index_select(0, i), (*_ONE, _ROWS)),
    Operator("gather", lambda x, i: x.gather(1, i), (*_ONE, Operand(_M, torch.int64, below=4))),
    Operator(
        "scatter",
        lambda x, i, y: x.scatter(1, i, y),
        (*_ONE, Operand(_M, torch.int64, below=4), *_ONE),
    ),
    Operator("index_put", lambda x, i, y: x.index_put((i,), y), (*_ONE, _ROWS, *_ONE)),
)
_FACTORIES = (
    Operator("zeros_like", torch.zeros_like, _ONE, _ALL),
    Operator("ones_like", torch.ones_like, _ONE),
    Operator("full_like", lambda x: torch.full_like(x, 3), _ONE),
    Operator("new_zeros", lambda x: x.new_zeros(3, 5), _ONE, _ALL),
    Operator("new_zeros of its shape", lambda x: x.new_zeros(8, 4), _ONE),
    Operator("new_ones", lambda x: x.new_ones(8), _ONE),
    Operator("new_full", lambda x: x.new_full((8, 4), 2), _ONE),
)
_NO_GRAD = tuple(Operand(_M, differentiable=False) for _ in range(4))
_FOREACH = (
    Operator("_foreach_add_", _foreach("add_"), _NO_GRAD, mutates=2),
    Operator("_foreach_mul", _foreach("mul", returns=True), _NO_GRAD),
    Operator("_foreach_mul_ scalar", lambda *xs: torch._foreach_mul_(xs, 2.0), _NO_GRAD, mutates=4),
    Operator("_foreach_lerp_", _foreach("lerp_", 0.5), _NO_GRAD, mutates=2),
    Operator("_foreach_norm", lambda *xs: torch._foreach_norm(xs), _NO_GRAD),
    Operator("_foreach_sqrt", lambda *xs: torch._foreach_sqrt(xs), _NO_GRAD),
    Operator("_foreach_addcdiv_", lambda x, y, z, w: torch._foreach_addcdiv_([x], [y], [z], 0.5),
             _NO_GRAD, mutates=1),
    Operator(
        "_fused_adamw_", _adamw,
        (*_NO_GRAD, Operand((), torch.float32, differentiable=False, fixed="R")),
        (torch.float32,), mutates=4,
    ),
)  # fmt: skip
#: The table, by kind of operator.
OPERATORS: tuple[Operator, ...] = (
    *_POINTWISE, *_IN_PLACE, *_REDUCTIONS, *_PRODUCTS, *_VIEWS, *_JOINS, *_LAYERS, *_INDEXING,
    *_FACTORIES, *_FOREACH,
)  # fmt: skip
