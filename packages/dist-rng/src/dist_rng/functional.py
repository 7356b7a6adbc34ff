"""Random fills of local tensors without DTensor: each takes the local tensor and its region.

Every function fills ``local`` with what one device would have drawn at the elements of the global
tensor that ``region`` selects, and advances ``generator`` as that device would have: by the draws
of the *global* tensor, also on ranks that hold nothing. There is no communication, except in
``trunc_normal_``.

All of them raise ``ValueError`` where the region does not match the local tensor, and ``TypeError``
for a dtype or device that the operation does not support.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dist_rng import cpu, cuda, emulation
from dist_rng.distributions import (
    AllIntegers,
    Bernoulli,
    BernoulliTensor,
    Cauchy,
    Distribution,
    Exponential,
    FusedDropout,
    Geometric,
    Integers,
    LogNormal,
    Normal,
    Uniform,
)
from dist_rng.emulation.device import is_active
from dist_rng.regions.region import Region

aten = torch.ops.aten


def uniform_(
    local: Tensor,
    region: Region,
    low: float = 0.0,
    high: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fills ``local`` from the uniform distribution on [low, high), as ``Tensor.uniform_`` does."""
    return fill(local, region, Uniform(low, high), generator=generator)


def normal_(
    local: Tensor,
    region: Region,
    mean: float = 0.0,
    std: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fills ``local`` from the normal distribution, as ``Tensor.normal_`` does."""
    return fill(local, region, Normal(mean, std), generator=generator)


def bernoulli_(
    local: Tensor,
    region: Region,
    p: float | Tensor = 0.5,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fills ``local`` with ones of probability ``p``, as ``Tensor.bernoulli_`` does.

    Args:
        local: tensor of any dtype.
        region: the elements of the global tensor that ``local`` holds.
        p: one probability, or local probabilities of ``local``'s shape, floating point.
        generator: as for the other functions of this module.
    """
    if isinstance(p, Tensor):
        return fill(local, region, BernoulliTensor(), probabilities=p, generator=generator)
    return fill(local, region, Bernoulli(p), generator=generator)


def exponential_(
    local: Tensor,
    region: Region,
    lambd: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fills ``local`` from the exponential distribution, as ``Tensor.exponential_`` does."""
    return fill(local, region, Exponential(lambd), generator=generator)


def cauchy_(
    local: Tensor,
    region: Region,
    median: float = 0.0,
    sigma: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fills ``local`` from the Cauchy distribution, as ``Tensor.cauchy_`` does; on CPUs only."""
    return fill(local, region, Cauchy(median, sigma), generator=generator)


def geometric_(
    local: Tensor, region: Region, p: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """Fills ``local`` from the geometric distribution, as ``Tensor.geometric_``; on CPUs only."""
    return fill(local, region, Geometric(p), generator=generator)


def log_normal_(
    local: Tensor,
    region: Region,
    mean: float = 1.0,
    std: float = 2.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fills ``local`` with exponentials of normal numbers, as ``Tensor.log_normal_``; CPUs only."""
    return fill(local, region, LogNormal(mean, std), generator=generator)


def randint_(
    local: Tensor,
    region: Region,
    low: int,
    high: int,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fills ``local`` with integers ``low <= x < high``, as ``Tensor.random_(low, high)`` does."""
    return fill(local, region, Integers(low, high), generator=generator)


def random_(local: Tensor, region: Region, *, generator: torch.Generator | None = None) -> Tensor:
    """Fills ``local`` with integers from 0 to its dtype's largest, as ``Tensor.random_()`` does."""
    return fill(local, region, AllIntegers(), generator=generator)


def dropout(
    local: Tensor,
    region: Region,
    p: float = 0.5,
    *,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns ``local`` with the elements zeroed that one device's ``F.dropout`` would zero.

    Differentiable in ``local``; the values are those of the device's kernel, bit for bit.

    Raises:
        ValueError: ``p`` is outside [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: expected a probability in [0, 1], got {p}")
    if not training or p == 0.0 or region.global_numel == 0:
        return local
    if p == 1.0:
        return local * torch.zeros((), dtype=local.dtype, device=local.device)  # draws nothing
    if draws_as_gpu(local):
        mask = torch.empty_like(local, dtype=torch.bool)
        fill(mask, region, FusedDropout(p, local.itemsize), generator=generator)
        return apply_fused_mask(local, mask, p)
    noise = torch.empty_like(local)
    fill(noise, region, Bernoulli(1.0 - p), generator=generator)
    # The order of torch's _dropout_impl (aten/src/ATen/native/Dropout.cpp): divide, then scale.
    return local * noise.div_(1.0 - p)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Region,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Computes attention of local tensors, with the dropout mask that one device would draw.

    On a CPU torch computes attention with dropout by its math backend, which draws the mask of all
    attention weights. It does so here, for a part of the batch or of the heads.

    Args:
        query: (batch, heads, queries, features), local.
        key: (batch, heads or groups, keys, features), local.
        value: the same as ``key``.
        weights: the attention weights, (batch, heads, queries, keys), that this rank computes.
        attn_mask: as for ``torch.nn.functional.scaled_dot_product_attention``, of the local part.
        dropout_p: the probability of a weight to become zero.
        is_causal: as for torch's function.
        scale: as for torch's function.
        enable_gqa: as for torch's function.
        generator: as for the other functions of this module.

    Raises:
        ValueError: on CUDA, or where a GPU is emulated: a fused kernel numbers its draws by the
            local batch and head.
    """
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if dropout_p > 0.0 and draws_as_gpu(query):
        raise ValueError(no_fused_attention(dropout_p))
    attend = torch._C._nn.scaled_dot_product_attention
    with _DrawByRegion(weights, None, generator):
        result: Tensor = attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if weights.numel == 0 and 0.0 < dropout_p < 1.0:
        # torch's dropout of no weights returns before it draws; the global tensor has some.
        fill(
            query.new_empty(weights.grid_shape),
            weights,
            Bernoulli(1.0 - dropout_p),
            generator=generator,
        )
    return result


def no_fused_attention(dropout_p: float) -> str:
    """Returns why the fused kernels of a GPU cannot draw a shard of one device's mask."""
    return (
        "scaled_dot_product_attention on CUDA, of a part of a global tensor: expected dropout_p=0,"
        f" got {dropout_p}; the fused kernels number their random draws by the local batch and"
        " head, so a shard cannot draw one device's mask; use dropout_p=0, or write attention as"
        " matmul, softmax and nn.Dropout"
    )


def trunc_normal_(
    local: Tensor,
    region: Region,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    *,
    group: dist.ProcessGroup | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fills ``local`` from the normal distribution on [a, b], as ``nn.init.trunc_normal_`` does.

    From 2.12 on torch draws again until no element of the global tensor is rejected, so the ranks
    that hold its parts agree on every round, with an all-reduce of one element each.

    Args:
        local: floating-point tensor.
        region: the elements of the global tensor that ``local`` holds.
        mean: mean of the normal distribution before the truncation.
        std: standard deviation of the normal distribution before the truncation.
        a: lower bound of the truncation.
        b: upper bound of the truncation.
        group: the ranks that together hold the global tensor; None if ``local`` holds all of it.
        generator: as for the other functions of this module.

    Raises:
        ValueError: ``local`` is only a part of the global tensor and ``group`` is None.
    """
    if group is None and region.numel != region.global_numel:
        raise ValueError(
            f"trunc_normal_ of {region.numel} out of {region.global_numel} elements: expected the"
            " process group of the ranks that hold the others, got None; pass it as `group`"
        )
    with _DrawByRegion(region, group, generator):
        nn.init.trunc_normal_(local, mean, std, a, b)
    return local


class _DrawByRegion(TorchDispatchMode):
    """Draws every tensor inside the context as a local tensor of ``region``."""

    def __init__(
        self, region: Region, group: dist.ProcessGroup | None, generator: torch.Generator | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region
        self._group = group
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is aten.normal_.default:
            return fill(args[0], self._region, Normal(*args[1:]), generator=self._generator)
        if func is aten.uniform_.default:
            return fill(args[0], self._region, Uniform(*args[1:]), generator=self._generator)
        if func is aten.bernoulli_.float:
            return fill(args[0], self._region, Bernoulli(args[1]), generator=self._generator)
        result = func(*args, **(kwargs or {}))
        if func is aten.any.default and self._group is not None:
            any_rejected = result.int()
            dist.all_reduce(any_rejected, dist.ReduceOp.MAX, self._group)
            return any_rejected.bool()
        return result


def draws_as_gpu(local: Tensor) -> bool:
    """Returns whether a GPU is reproduced, where dropout is one fused kernel."""
    return local.is_cuda or is_active()


def apply_fused_mask(local: Tensor, mask: Tensor, p: float) -> Tensor:
    """Returns the output of the fused kernel: ``x * mask / (1 - p)`` in fp32 or fp64."""
    wide = local if local.dtype == torch.float64 else local.float()
    return (wide * mask * (1.0 / (1.0 - p))).to(local.dtype)


def _fill_as_emulated(
    local: Tensor,
    region: Region,
    draw: Distribution,
    generator: torch.Generator | None,
    probabilities: Tensor | None,
) -> None:
    """Draws on the host; an accelerator without kernels of its own gets a copy."""
    host = local if local.device.type == "cpu" else torch.empty_like(local, device="cpu")
    chances = None if probabilities is None else probabilities.to("cpu")
    emulation.fill(host, region, draw, generator, probabilities=chances)
    if host is not local:
        local.copy_(host)


def fill(
    local: Tensor,
    region: Region,
    draw: Distribution,
    *,
    probabilities: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fills ``local`` from any distribution with the backend of its device, and returns it.

    Meta tensors and FakeTensors draw nothing and do not advance the generator, as on one device.
    """
    if local.is_meta or isinstance(local, FakeTensor):
        return local
    with torch.no_grad():
        if local.is_cuda:
            cuda.fill(local, region, draw, generator, probabilities=probabilities)
        elif is_active():
            _fill_as_emulated(local, region, draw, generator, probabilities)
        elif local.device.type != "cpu":
            raise TypeError(
                f"expected a CPU or CUDA tensor, got one on {local.device}, whose generator is"
                " unknown; draw on the CPU and move the result, or within dist_rng.emulated_device"
            )
        else:
            cpu.fill(local, region, draw, generator, probabilities=probabilities)
    return local
