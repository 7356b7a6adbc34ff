"""install() and uninstall(): random operators on DTensors equal to one device's, from here on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed.tensor._api as dtensor_api
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from dist_rng.agreement import first_draw_check
from dist_rng.draws import Distribution, Normal, Uniform
from dist_rng.dtensor import fill_tensor, handlers
from dist_rng.placement import region_of, slice_of

_active = ExitStack()
_installed = False


def install(*, check_generators: bool = False) -> None:
    """Make every random operator on DTensors draw what one device would; process-wide.

    In-place fills, ``*_like``, ``torch.distributed.tensor.rand`` and ``randn``, dropout and
    ``nn.init`` (``orthogonal_`` and ``sparse_`` included: each rank makes the whole matrix), on
    CPU and CUDA meshes. Ranks must hold equal generators: call ``torch.manual_seed`` with one
    seed on all of them. No call communicates, except that ``trunc_normal_`` agrees on its
    rounds of rejection.

    Call it before anything imports functions out of ``torch.nn.init`` by name. Calling it
    again does nothing more; ``uninstall`` restores stock behaviour.

    Args:
        check_generators: compare the ranks' generators once per mesh, before the first draw
            there, and raise ``RuntimeError`` on every rank where they differ.
    """
    global _installed
    first_draw_check.reset(enabled=check_generators)
    if not _installed:
        _active.enter_context(patched_initialisers())
        _active.enter_context(patched_operators())
        _installed = True


def uninstall() -> None:
    """Restore what torch does by itself; nothing happens where nothing is installed."""
    global _installed
    first_draw_check.reset(enabled=False)
    _active.close()
    _installed = False


def is_installed() -> bool:
    """Return whether random operators on DTensors are ours at present."""
    return _installed


@contextmanager
def patched_operators() -> Iterator[None]:
    """Put our handlers into DTensor's table for the length of the context."""
    table = DTensor._op_dispatcher._custom_op_handlers
    ours = handlers()
    stock = {operator: table[operator] for operator in ours if operator in table}
    table.update(ours)
    try:
        yield
    finally:
        for operator in ours:
            del table[operator]
        table.update(stock)


@contextmanager
def patched_initialisers() -> Iterator[None]:
    """Replace the few functions that the operators alone do not put right."""
    with ExitStack() as undo:
        for owner, name, make in (
            (dtensor_api, "_dtensor_init_helper", _init_helper),
            (nn.init, "orthogonal_", _whole_then_slice),
            (nn.init, "sparse_", _whole_then_slice),
            (nn.init, "_no_grad_trunc_normal_", _agreed_rejection),
            (nn.functional, "scaled_dot_product_attention", _attention),
        ):
            stock = getattr(owner, name)
            undo.callback(setattr, owner, name, stock)
            setattr(owner, name, make(stock))
        yield


def _init_helper(stock: Any) -> Any:
    """``torch.distributed.tensor.rand`` and ``randn``: allocate, then draw."""
    draws: dict[Any, Distribution] = {torch.rand: Uniform(), torch.randn: Normal()}

    @wraps(stock)
    def helper(init_op: Any, size: Any, *args: Any, **kwargs: Any) -> DTensor:
        if init_op not in draws:
            return stock(init_op, size, *args, **kwargs)  # type: ignore[no-any-return]
        result: DTensor = stock(torch.empty, size, *args, **kwargs)
        fill_tensor(result, draws[init_op])
        return result

    return helper


def _whole_then_slice(stock: Any) -> Any:
    """An initialiser that needs the whole matrix: every rank makes it and keeps its part."""

    @wraps(stock)
    def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, DTensor):
            return stock(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        local, region = tensor._local_tensor, region_of(tensor)
        with torch.no_grad():
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
            stock(full, *args, **kwargs)
            local.copy_(slice_of(full, region).view(local.shape))
        return tensor

    return initialise


def _agreed_rejection(stock: Any) -> Any:
    """``trunc_normal_`` draws until no element of any rank is rejected, on every rank.

    torch asks a DTensor's ``any()`` for a bool, and gets the rank's own: here it is everybody's.
    """

    @wraps(stock)
    def trunc_normal_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        if not isinstance(tensor, DTensor):
            return stock(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        table[torch.ops.aten.any.default] = _any_on_any_rank
        try:
            return stock(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        finally:
            del table[torch.ops.aten.any.default]

    return trunc_normal_


def _any_on_any_rank(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    (source,) = args
    found = operator(source._local_tensor, **kwargs).int()
    placements = [Replicate() if p.is_replicate() else Partial("max") for p in source.placements]
    return DTensor.from_local(found, source.device_mesh, placements).full_tensor().bool()


def _attention(stock: Any) -> Any:
    """``scaled_dot_product_attention`` with dropout: refused where a fused kernel counts."""

    # The original takes is_causal by position too (nn.MultiheadAttention does): pass on the call
    # as it came, and only look at two of its arguments.
    @wraps(stock)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        query = args[0] if args else kwargs.get("query")
        dropout_p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if isinstance(query, DTensor) and query._local_tensor.is_cuda and dropout_p > 0.0:
            raise ValueError(
                f"scaled_dot_product_attention on a DTensor with dropout_p={dropout_p}: the fused"
                " CUDA kernels number their random draws by the local batch and head, so a shard"
                " cannot draw one device's mask; use dropout_p=0, or write attention as matmul,"
                " softmax and nn.Dropout"
            )
        return stock(*args, **kwargs)  # type: ignore[no-any-return]

    return scaled_dot_product_attention
