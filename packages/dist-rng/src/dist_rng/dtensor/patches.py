"""install() and uninstall(): the patches that make DTensors draw the numbers of one device."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed.tensor._api as dtensor_api
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from dist_rng.distributions import Distribution, Normal, Uniform
from dist_rng.dtensor.agreement import first_draw_check
from dist_rng.dtensor.handlers import fill_tensor, handlers
from dist_rng.functional import no_fused_attention
from dist_rng.regions.placements import slice_of
from dist_rng.regions.region import Region

_active = ExitStack()
_installed = False


def install(*, check_generators: bool = False) -> None:
    """Makes every random operator on DTensors draw what one device would have drawn, process-wide.

    This covers in-place fills, ``*_like``, ``torch.distributed.tensor.rand`` and ``randn``, dropout
    and ``nn.init`` (also ``orthogonal_`` and ``sparse_``, for which each rank makes the global
    matrix), on CPU and CUDA meshes. Ranks must have equal generators: call ``torch.manual_seed``
    with one seed on all of them. Nothing communicates except ``trunc_normal_``, whose ranks agree
    on its rounds of rejection, and ``poisson`` and ``multinomial``, which gather sharded inputs.

    It adds handlers to DTensor's ``OpDispatcher._custom_op_handlers``, and patches
    ``torch.distributed.tensor._api._dtensor_init_helper``, ``nn.init.orthogonal_``,
    ``nn.init.sparse_``, ``nn.init._no_grad_trunc_normal_`` and
    ``nn.functional.scaled_dot_product_attention``.

    Call it before other modules import functions of ``torch.nn.init`` by name. A second call only
    sets ``check_generators``; ``uninstall`` restores torch's behaviour.

    Args:
        check_generators: compare the ranks' generators once per mesh, before its first draw, and
            raise ``RuntimeError`` on every rank if they differ.
    """
    global _installed
    first_draw_check.reset(enabled=check_generators)
    if not _installed:
        _active.enter_context(patched_initializers())
        _active.enter_context(patched_operators())
        _installed = True


def uninstall() -> None:
    """Restores torch's behaviour; does nothing if ``install`` was not called."""
    global _installed
    first_draw_check.reset(enabled=False)
    _active.close()
    _installed = False


def is_installed() -> bool:
    """Returns whether random operators on DTensors are handled by this package."""
    return _installed


@contextmanager
def patched_operators() -> Iterator[None]:
    """Adds the handlers to DTensor's table inside the context."""
    table = DTensor._op_dispatcher._custom_op_handlers
    added = handlers()
    replaced = {operator: table[operator] for operator in added if operator in table}
    table.update(added)
    try:
        yield
    finally:
        for operator in added:
            del table[operator]
        table.update(replaced)


@contextmanager
def patched_initializers() -> Iterator[None]:
    """Patches the functions for which handlers of operators are not enough, inside the context."""
    with ExitStack() as patches:
        for owner, name, patch in (
            (dtensor_api, "_dtensor_init_helper", _init_helper),
            (nn.init, "orthogonal_", _global_then_slice),
            (nn.init, "sparse_", _global_then_slice),
            (nn.init, "_no_grad_trunc_normal_", _agreed_rejection),
            (nn.functional, "scaled_dot_product_attention", _attention),
        ):
            patches.enter_context(_patched(owner, name, patch))
        yield


@contextmanager
def _patched(owner: Any, name: str, patch: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces a function inside the context.

    Another package may have wrapped the replacement by the end of the context. Its function stays
    in place then, and the replacement that it calls does what the native one does.
    """
    native = getattr(owner, name)
    current = patch(native)

    @wraps(native)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return current(*args, **kwargs)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        current = native
        if getattr(owner, name) is replacement:
            setattr(owner, name, native)


def _init_helper(native: Any) -> Any:
    """Patches ``torch.distributed.tensor.rand`` and ``randn``: allocates, then draws."""
    draws: dict[Any, Distribution] = {torch.rand: Uniform(), torch.randn: Normal()}

    def init_helper(init_op: Any, size: Any, *args: Any, **kwargs: Any) -> DTensor:
        if init_op not in draws:
            return native(init_op, size, *args, **kwargs)  # type: ignore[no-any-return]
        result: DTensor = native(torch.empty, size, *args, **kwargs)
        fill_tensor(result, draws[init_op])
        return result

    return init_helper


def _global_then_slice(native: Any) -> Any:
    """Patches an initializer of global matrices: every rank makes one and copies its part."""

    def initialize(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, DTensor):
            return native(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        local, region = tensor._local_tensor, Region.of(tensor)
        with torch.no_grad():
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
            native(full, *args, **kwargs)
            local.copy_(slice_of(full, region).view(local.shape))
        return tensor

    return initialize


def _agreed_rejection(native: Any) -> Any:
    """Patches ``trunc_normal_``: all ranks draw until no element of any rank is rejected.

    torch converts a DTensor's ``any()`` to a bool, which is that of the local tensor; inside the
    patch it is reduced over all ranks.
    """

    def trunc_normal_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        if not isinstance(tensor, DTensor):
            return native(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        table[torch.ops.aten.any.default] = _any_on_any_rank
        try:
            return native(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        finally:
            del table[torch.ops.aten.any.default]

    return trunc_normal_


def _any_on_any_rank(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    (source,) = args
    local = operator(source._local_tensor, **kwargs).int()
    placements = [Replicate() if p.is_replicate() else Partial("max") for p in source.placements]
    return DTensor.from_local(local, source.device_mesh, placements).full_tensor().bool()


def _attention(native: Any) -> Any:
    """Patches ``scaled_dot_product_attention``: raises for dropout of fused kernels on DTensors."""

    # The original also takes is_causal by position (nn.MultiheadAttention passes it so): pass the
    # arguments on unchanged, and read only two of them.
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        query = args[0] if args else kwargs.get("query")
        dropout_p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if isinstance(query, DTensor) and query._local_tensor.is_cuda and dropout_p > 0.0:
            raise ValueError(no_fused_attention(dropout_p))
        return native(*args, **kwargs)  # type: ignore[no-any-return]

    return scaled_dot_product_attention
