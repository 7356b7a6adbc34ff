"""The table of operators that tests of DTensor dispatch run through, by kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from testkit.operators.operator import FLOATS, OpEntry, OpInput

_ALL = (*FLOATS, torch.int64)


def _of(*shapes: tuple[int, ...]) -> tuple[OpInput, ...]:
    return tuple(OpInput(shape) for shape in shapes)


_M = (8, 4)  # even on four ranks and on two by two
_ODD = (7, 6)  # 2, 2, 2, 1 rows and 2, 2, 2, 0 columns
_ONE, _TWO, _THREE = _of(_M), _of(_M, _M), _of(_M, _M, _M)
_CUBE = _of((4, 8, 4))
_MASK = OpInput(_M, torch.bool)
_ROWS = OpInput((8,), torch.int64, below=8)


def _out(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Returns the out= variant of a function, which writes to the first operand."""
    return lambda out, *operands: function(*operands, *args, out=out)


def _adamw(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Runs a fused AdamW step of a parameter, given its gradient, two averages and the step."""
    param, grad, average, square, step = tensors
    torch._fused_adamw_(
        [param], [grad], [average], [square.abs_()], [], [step], lr=0.1, beta1=0.9, beta2=0.99,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return [param]


def _foreach(name: str, *args: Any, returns: bool = False) -> Callable[..., Any]:
    """Returns a foreach operator of two lists, which are the halves of its operands."""
    function = getattr(torch, f"_foreach_{name}")

    def run(*operands: torch.Tensor) -> Any:
        half = len(operands) // 2
        result = function(list(operands[:half]), list(operands[half:]), *args)
        return result if returns else list(operands[:half])

    return run


_POINTWISE = (
    OpEntry("neg", torch.neg, _ONE, _ALL),
    OpEntry("abs", torch.abs, _ONE, _ALL),
    OpEntry("exp", torch.exp, _ONE),
    OpEntry("log", torch.log, _ONE),
    OpEntry("rsqrt", torch.rsqrt, _ONE),
    OpEntry("tanh", torch.tanh, _ONE),
    OpEntry("sigmoid", torch.sigmoid, _ONE),
    OpEntry("relu", torch.relu, _ONE),
    OpEntry("silu", F.silu, _ONE),
    OpEntry("gelu", F.gelu, _ONE),
    OpEntry("gelu tanh", functools.partial(F.gelu, approximate="tanh"), _ONE),
    OpEntry("pow scalar", lambda x: x.pow(2), _ONE, _ALL),
    OpEntry("clamp", lambda x: x.clamp(-1, 2), _ONE, _ALL),
    OpEntry("add", torch.add, _TWO, _ALL),
    OpEntry("add odd", torch.add, _of(_ODD, _ODD)),
    OpEntry("add alpha", lambda x, y: torch.add(x, y, alpha=2), _TWO),
    OpEntry("add of a row", torch.add, _of(_M, (4,))),
    OpEntry("add of a column", torch.add, _of(_M, (8, 1))),
    OpEntry("add of a scalar tensor", torch.add, _of(_M, ())),
    OpEntry("sub", torch.sub, _TWO, _ALL),
    OpEntry("mul", torch.mul, _TWO, _ALL),
    OpEntry("div", torch.div, _TWO, _ALL),
    OpEntry("add scalar", lambda x: x + 2, _ONE, _ALL),
    OpEntry("sub from scalar", lambda x: 2 - x, _ONE, _ALL),
    OpEntry("mul scalar", lambda x: x * 2.5, _ONE, _ALL),
    OpEntry("mul scalar odd", lambda x: x * 2.5, _of(_ODD)),
    OpEntry("div scalar", lambda x: x / 3, _ONE, _ALL),
    OpEntry("maximum", torch.maximum, _TWO),
    OpEntry("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), _THREE),
    OpEntry("lerp", lambda x, y: torch.lerp(x, y, 0.25), _TWO),
    OpEntry("gt scalar", lambda x: x > 0, _ONE, _ALL),
    OpEntry("eq", torch.eq, _TWO, _ALL),
    OpEntry("logical_not", torch.logical_not, (_MASK,), (torch.float32,)),
    OpEntry("isnan", torch.isnan, _ONE),
    OpEntry("where", torch.where, (_MASK, *_TWO), _ALL),
    OpEntry("where scalar", lambda m, x: torch.where(m, x, 0.0), (_MASK, *_ONE)),
    OpEntry("masked_fill", lambda x, m: x.masked_fill(m, -1.0), (*_ONE, _MASK)),
    OpEntry("to dtype", lambda x: x.to(torch.float64), _ONE, _ALL),
    OpEntry("clone", torch.clone, _ONE, _ALL),
    OpEntry("contiguous of t", lambda x: x.t().contiguous(), _ONE),
    OpEntry("chain of views", lambda x: (x.t() * 2).t().unsqueeze(0) + 1, _ONE),
)
_IN_PLACE = (
    OpEntry("add_", lambda x, y: x.add_(y), _TWO, _ALL, mutates=1),
    OpEntry("mul_ scalar", lambda x: x.mul_(2), _ONE, _ALL, mutates=1),
    OpEntry("addcdiv_", lambda x, y, z: x.addcdiv_(y, z, value=-0.1), _THREE, mutates=1),
    OpEntry("relu_", torch.relu_, _ONE, mutates=1),
    OpEntry("zero_", torch.zero_, _ONE, _ALL, mutates=1),
    OpEntry("fill_", lambda x: x.fill_(3), _ONE, _ALL, mutates=1),
    OpEntry("copy_", lambda x, y: x.copy_(y), _TWO, _ALL, mutates=1),
    OpEntry("copy_ of a row", lambda x, y: x.copy_(y), _of(_M, (4,)), mutates=1),
    OpEntry("masked_fill_", lambda x, m: x.masked_fill_(m, 2), (*_ONE, _MASK), mutates=1),
    OpEntry("add_ to a view", lambda x: x.view(2, 4, 4).add_(1), _ONE, mutates=1),
    OpEntry("add_ to t", lambda x: x.t().add_(1), _ONE, mutates=1),
    OpEntry("add out=", _out(torch.add), _THREE, mutates=1),
    OpEntry("mul out=", _out(torch.mul), _THREE, mutates=1),
    OpEntry("neg out=", _out(torch.neg), _TWO, mutates=1),
    OpEntry(
        "mm out=",
        _out(torch.mm),
        tuple(OpInput(shape, fixed="R") for shape in ((8, 8), _M, (4, 8))),
        mutates=1,
    ),
)
_REDUCTIONS = (
    OpEntry("sum", torch.sum, _ONE, _ALL),
    OpEntry("sum odd", torch.sum, _of(_ODD)),
    OpEntry("sum dim", lambda x: x.sum(0), _ONE, _ALL),
    OpEntry("sum keepdim", lambda x: x.sum(-1, keepdim=True), _ONE),
    OpEntry("sum dtype", lambda x: x.sum(1, dtype=torch.float64), _ONE),
    OpEntry("mean", torch.mean, _ONE),
    OpEntry("mean dim", lambda x: x.mean(-1, keepdim=True), _ONE),
    OpEntry("amax", lambda x: x.amax(1), _ONE),
    OpEntry("max", torch.max, _ONE, _ALL),
    OpEntry("max dim", lambda x: x.max(0), _ONE),
    OpEntry("all", torch.all, (_MASK,), (torch.float32,)),
    OpEntry("any", torch.any, (_MASK,), (torch.float32,)),
    OpEntry("var", lambda x: x.var(-1), _ONE),
    OpEntry("norm", torch.linalg.vector_norm, _ONE),
    OpEntry("argmax", lambda x: x.argmax(0), _ONE),
    OpEntry("cumsum", lambda x: x.cumsum(0), _ONE, _ALL),
    OpEntry("logsumexp", lambda x: x.logsumexp(1), _ONE),
    OpEntry("item", lambda x: x.item(), _of(()), _ALL),
    OpEntry("equal", torch.equal, _TWO, _ALL),
    OpEntry("topk", lambda x: x.topk(2, dim=1), _ONE),
    OpEntry("sort", lambda x: x.sort(dim=0), _ONE),
)
_PRODUCTS = (
    OpEntry("mm", torch.mm, _of(_M, (4, 8))),
    OpEntry("mm odd", torch.mm, _of(_ODD, (6, 7))),
    OpEntry("mm of t", lambda x, y: x @ y.t(), _TWO),
    OpEntry("mv", torch.mv, _of(_M, (4,))),
    OpEntry("dot", torch.dot, _of((8,), (8,))),
    OpEntry("bmm", torch.bmm, _of((4, 8, 4), (4, 4, 8))),
    OpEntry("addmm", torch.addmm, _of((8,), _M, (4, 8))),
    OpEntry("baddbmm", torch.baddbmm, _of((4, 8, 8), (4, 8, 4), (4, 4, 8))),
    OpEntry("matmul of 4 dims", torch.matmul, _of((2, 4, 8, 4), (2, 4, 4, 8))),
    OpEntry("linear", F.linear, _of((4, 8, 4), (8, 4))),
    OpEntry("linear bias", F.linear, _of((4, 8, 4), (8, 4), (8,))),
    OpEntry("einsum", lambda x, y: torch.einsum("bsd,ed->bse", x, y), _of((4, 8, 4), (8, 4))),
)
_VIEWS = (
    OpEntry("view", lambda x: x.view(32), _ONE, _ALL),
    OpEntry("view of another rank", lambda x: x.view(2, 4, 4), _ONE),
    OpEntry("view as it is", lambda x: x.view(8, 4), _ONE),
    OpEntry("reshape odd", lambda x: x.reshape(7, 2, 3), _of(_ODD)),
    OpEntry("reshape of t", lambda x: x.t().reshape(2, 2, 8), _ONE),
    OpEntry("flatten", lambda x: x.flatten(0, 1), _CUBE),
    OpEntry("unflatten", lambda x: x.unflatten(0, (4, 2)), _ONE),
    OpEntry("t", torch.t, _ONE, _ALL),
    OpEntry("t odd", torch.t, _of(_ODD)),
    OpEntry("transpose", lambda x: x.transpose(-1, 0), _CUBE, _ALL),
    OpEntry("permute", lambda x: x.permute(2, 0, 1), _CUBE),
    OpEntry("slice", lambda x: x[2:6], _ONE, _ALL),
    OpEntry("slice step", lambda x: x[:, ::2], _ONE),
    OpEntry("slice all", lambda x: x[:], _ONE),
    OpEntry("narrow", lambda x: x.narrow(1, 1, 2), _ONE),
    OpEntry("select", lambda x: x[1], _ONE, _ALL),
    OpEntry("unsqueeze", lambda x: x.unsqueeze(0), _ONE, _ALL),
    OpEntry("squeeze", lambda x: x.squeeze(), _of((1, 8, 1, 4))),
    OpEntry("squeeze dim", lambda x: x.squeeze(0), _of((1, 8))),
    OpEntry("expand", lambda x: x.expand(4, 8, 4), _ONE),
    OpEntry("expand of one", lambda x: x.expand(-1, 4), _of((8, 1))),
    OpEntry("split", lambda x: x.split(2, 1), _ONE),
    OpEntry("split sizes", lambda x: x.split([3, 5]), _ONE),
    OpEntry("chunk", lambda x: x.chunk(2, -1), _ONE, _ALL),
    OpEntry("unbind", torch.unbind, _ONE),
    OpEntry("detach", torch.detach, _ONE, _ALL),
    OpEntry("alias", torch.ops.aten.alias.default, _ONE),
    OpEntry("view_as", lambda x, y: x.view_as(y), _TWO),
    OpEntry("diagonal", torch.diagonal, _of((8, 8))),
)
_JOINS = (
    OpEntry("cat", lambda x, y: torch.cat([x, y], 0), _TWO, _ALL),
    OpEntry("cat last", lambda x, y: torch.cat([x, y], -1), _TWO),
    OpEntry("cat odd", lambda x, y: torch.cat([x, y], 1), _of(_ODD, _ODD)),
    OpEntry("cat of three", lambda *xs: torch.cat(xs), _THREE),
    OpEntry("stack", lambda x, y: torch.stack([x, y]), _TWO),
    OpEntry("repeat", lambda x: x.repeat(2, 1), _ONE),
    OpEntry("repeat_interleave", lambda x: x.repeat_interleave(2, 1), _ONE),
    OpEntry("pad", lambda x: F.pad(x, (1, 1)), _ONE),
    OpEntry("flip", lambda x: x.flip(0), _ONE),
    OpEntry("roll", lambda x: x.roll(1, 0), _ONE),
    OpEntry("triu", torch.triu, _of((8, 8))),
)
_LAYERS = (
    OpEntry("softmax", lambda x: x.softmax(-1), _ONE),
    OpEntry("softmax of rows", lambda x: x.softmax(0), _ONE),
    OpEntry("log_softmax", lambda x: x.log_softmax(-1), _ONE),
    OpEntry("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), _of((2, 8, 4), (4,), (4,))),
    OpEntry("layer_norm bare", lambda x: F.layer_norm(x, (4,)), _ONE),
    OpEntry("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), _of((2, 8, 4), (4,))),
    OpEntry(
        "rms_norm of LLaMA",
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        _of((2, 8, 4), (4,)),
    ),
    OpEntry("nll_loss", F.nll_loss, (*_ONE, OpInput((8,), torch.int64, below=4))),
    OpEntry("cross_entropy", F.cross_entropy, (*_ONE, OpInput((8,), torch.int64, below=4))),
    OpEntry("mse_loss", F.mse_loss, _TWO),
    OpEntry("embedding", lambda i, w: F.embedding(i, w), (_ROWS, *_ONE)),
    OpEntry(
        "embedding odd",
        lambda i, w: F.embedding(i, w),
        (OpInput((2, 3), torch.int64, below=7), *_of(_ODD)),
    ),
    OpEntry(
        "sdpa",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        _of((2, 4, 8, 4), (2, 4, 8, 4), (2, 4, 8, 4)),
    ),
    OpEntry("dropout in eval", lambda x: F.dropout(x, 0.5, training=False), _ONE),
)
_INDEXING = (
    OpEntry("index rows", lambda x, i: x[i], (*_ONE, _ROWS)),
    OpEntry("index_select", lambda x, i: x.index_select(0, i), (*_ONE, _ROWS)),
    OpEntry("gather", lambda x, i: x.gather(1, i), (*_ONE, OpInput(_M, torch.int64, below=4))),
    OpEntry(
        "scatter",
        lambda x, i, y: x.scatter(1, i, y),
        (*_ONE, OpInput(_M, torch.int64, below=4), *_ONE),
    ),
    OpEntry("index_put", lambda x, i, y: x.index_put((i,), y), (*_ONE, _ROWS, *_ONE)),
)
_FACTORIES = (
    OpEntry("zeros_like", torch.zeros_like, _ONE, _ALL),
    OpEntry("ones_like", torch.ones_like, _ONE),
    OpEntry("full_like", lambda x: torch.full_like(x, 3), _ONE),
    OpEntry("new_zeros", lambda x: x.new_zeros(3, 5), _ONE, _ALL),
    OpEntry("new_zeros of its shape", lambda x: x.new_zeros(8, 4), _ONE),
    OpEntry("new_ones", lambda x: x.new_ones(8), _ONE),
    OpEntry("new_full", lambda x: x.new_full((8, 4), 2), _ONE),
)
_NO_GRAD = tuple(OpInput(_M, differentiable=False) for _ in range(4))
_FOREACH = (
    OpEntry("_foreach_add_", _foreach("add_"), _NO_GRAD, mutates=2),
    OpEntry("_foreach_mul", _foreach("mul", returns=True), _NO_GRAD),
    OpEntry("_foreach_mul_ scalar", lambda *xs: torch._foreach_mul_(xs, 2.0), _NO_GRAD, mutates=4),
    OpEntry("_foreach_lerp_", _foreach("lerp_", 0.5), _NO_GRAD, mutates=2),
    OpEntry("_foreach_norm", lambda *xs: torch._foreach_norm(xs), _NO_GRAD),
    OpEntry("_foreach_sqrt", lambda *xs: torch._foreach_sqrt(xs), _NO_GRAD),
    OpEntry("_foreach_addcdiv_", lambda x, y, z, w: torch._foreach_addcdiv_([x], [y], [z], 0.5),
             _NO_GRAD, mutates=1),
    OpEntry(
        "_fused_adamw_", _adamw,
        (*_NO_GRAD, OpInput((), torch.float32, differentiable=False, fixed="R")),
        (torch.float32,), mutates=4,
    ),
)  # fmt: skip
#: The table, by kind of operator.
OPERATORS: tuple[OpEntry, ...] = (
    *_POINTWISE, *_IN_PLACE, *_REDUCTIONS, *_PRODUCTS, *_VIEWS, *_JOINS, *_LAYERS, *_INDEXING,
    *_FACTORIES, *_FOREACH,
)  # fmt: skip
