"""The handlers of random operators on DTensors, and on plain tensors as global tensors.

Note [extension point]
    ``OpDispatcher._custom_op_handlers`` maps an operator to a function that torch's DTensor
    dispatch calls instead of its own steps, below autograd, with the DTensors as arguments. An
    entry for each random operator is enough: everything else, from ``nn.init`` to dropout and
    activation checkpointing, calls those operators.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from dist_rng import functional
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
    largest_integer,
)
from dist_rng.dtensor.agreement import first_draw_check
from dist_rng.dtensor.empty_like import empty_like
from dist_rng.emulation.device import is_active
from dist_rng.regions.placements import slice_of
from dist_rng.regions.region import Region, memory_order

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Arguments = dict[str, Any]

aten = torch.ops.aten


def handlers() -> dict[Any, Handler]:
    """Returns a handler for every random operator that can be called on a DTensor.

    Operators that are not reproduced have one that raises, so that a DTensor never silently gets
    the numbers of another stream.
    """
    table: dict[Any, Handler] = {}
    for operator in _UNSUPPORTED:
        table.update(dict.fromkeys(_overloads(operator), raise_unsupported))
    for operator, distribution_of in _IN_PLACE.items():
        table[operator] = _in_place(distribution_of)
    for operator, distribution_of in _LIKE.items():
        table[operator] = _like(distribution_of)
    table[aten.bernoulli_.Tensor] = _bernoulli_from_
    table[aten.bernoulli.default] = _bernoulli_from
    table[aten.bernoulli.p] = _bernoulli_of_p
    table[aten.native_dropout.default] = _native_dropout
    table[aten.normal.Tensor_float] = _normal_around
    table[aten.normal.float_Tensor] = _normal_around
    table[aten.normal.Tensor_Tensor] = _normal_around
    table[aten.poisson.default] = _poisson
    table[aten.multinomial.default] = _multinomial
    return table


def fill_tensor(
    tensor: Tensor,
    draw: Distribution,
    generator: torch.Generator | None = None,
    *,
    probabilities: Tensor | None = None,
) -> Tensor:
    """Fills this rank's part of ``tensor`` with what one device would have drawn there."""
    if isinstance(tensor, DTensor):
        first_draw_check(tensor.device_mesh, generator)
    local, region = local_of(tensor), local_region(tensor)
    if region.windows is None and local.ndim != len(region.global_shape):
        local = local.new_empty(region.grid_shape)  # outside of the mesh torch's has one dim
    functional.fill(
        local,
        region,
        draw,
        probabilities=probabilities,
        generator=generator,
    )
    return tensor


def local_of(tensor: Tensor) -> Tensor:
    """Returns the local tensor of a DTensor, or a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_region(tensor: Tensor) -> Region:
    """Returns the region of ``local_of(tensor)``; a plain tensor is a replica of itself."""
    if isinstance(tensor, DTensor):
        return Region.of(tensor)
    shape = tuple(tensor.shape)
    return Region.full(shape).with_memory_order(memory_order(shape, tensor.stride()))


# The distribution of each in-place operator, from its arguments by name.
_IN_PLACE: dict[Any, Callable[[Arguments], Distribution]] = {
    aten.uniform_.default: lambda a: Uniform(a["from"], a["to"]),
    aten.normal_.default: lambda a: Normal(a["mean"], a["std"]),
    aten.bernoulli_.float: lambda a: Bernoulli(a["p"]),
    aten.exponential_.default: lambda a: Exponential(a["lambd"]),
    aten.cauchy_.default: lambda a: Cauchy(a["median"], a["sigma"]),
    aten.geometric_.default: lambda a: Geometric(a["p"]),
    aten.log_normal_.default: lambda a: LogNormal(a["mean"], a["std"]),
    aten.random_.default: lambda a: AllIntegers(),
    aten.random_.to: lambda a: Integers(0, a["to"]),
    getattr(aten.random_, "from"): lambda a: Integers(a["from"], _upper_bound(a)),
}

_LIKE: dict[Any, Callable[[Arguments], Distribution]] = {
    aten.rand_like.default: lambda a: Uniform(),
    aten.randn_like.default: lambda a: Normal(),
    aten.rand_like.generator: lambda a: Uniform(),
    aten.randn_like.generator: lambda a: Normal(),
    aten.randint_like.default: lambda a: Integers(0, a["high"]),
    aten.randint_like.low_dtype: lambda a: Integers(a["low"], a["high"]),
    aten.randint_like.generator: lambda a: Integers(0, a["high"]),
    aten.randint_like.low_generator_dtype: lambda a: Integers(a["low"], a["high"]),
}

# Random operators whose stream is not reproduced: they raise on a DTensor.
_UNSUPPORTED = (
    *("binomial", "cauchy", "exponential", "geometric", "log_normal", "normal_functional"),
    *("poisson", "random", "uniform", "_fused_dropout"),
    *("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"),
    *("_sample_dirichlet", "_standard_gamma", "bernoulli", "normal", "rand_like", "randn_like"),
    *("randint_like", "multinomial", "native_dropout"),
)


def _in_place(distribution_of: Callable[[Arguments], Distribution]) -> Handler:
    def handler(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        named = bind(operator, args, kwargs)
        with _errors_named(operator):
            return fill_tensor(named["self"], distribution_of(named), named["generator"])

    return handler


def _like(distribution_of: Callable[[Arguments], Distribution]) -> Handler:
    def handler(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        named = bind(operator, args, kwargs)
        options = {key: value for key, value in kwargs.items() if key != "generator"}
        with _errors_named(operator):
            result = empty_like(named["self"], **options)
            return fill_tensor(result, distribution_of(named), named.get("generator"))

    return handler


def _bernoulli_from_(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    named = bind(operator, args, kwargs)
    target, probabilities = named["self"], named["p"]
    if isinstance(target, DTensor) and probabilities.ndim:
        placed = getattr(probabilities, "placements", "on no mesh")
        if placed != target.placements or probabilities.shape != target.shape:
            raise _error(
                operator,
                f"expected probabilities of the tensor's shape {tuple(target.shape)} and placements"
                f" {target.placements}, got {tuple(probabilities.shape)} and {placed}; redistribute"
                " them",
            )
    local = local_of(probabilities).expand(local_of(target).shape)
    with _errors_named(operator):
        return fill_tensor(target, BernoulliTensor(), named["generator"], probabilities=local)


def _bernoulli_from(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    named = bind(operator, args, kwargs)
    source = named["self"]
    with _errors_named(operator):
        # torch draws into a contiguous output, whatever the memory format of the probabilities.
        result = empty_like(source, memory_format=torch.contiguous_format)
        return fill_tensor(
            result, BernoulliTensor(), named["generator"], probabilities=local_of(source)
        )


def _bernoulli_of_p(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    named = bind(operator, args, kwargs)
    with _errors_named(operator):
        result = empty_like(named["self"], memory_format=torch.contiguous_format)
        return fill_tensor(result, Bernoulli(named["p"]), named["generator"])


def _native_dropout(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    named = bind(operator, args, kwargs)
    source, p = named["input"], named["p"]
    if named["train"] is False:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    with _errors_named(operator):
        mask = empty_like(source, dtype=torch.bool)
        result = empty_like(source)
        dropped = _dropped_on_gpu if functional.draws_as_gpu(local_of(source)) else _dropped_on_cpu
        local_of(result).copy_(dropped(source, mask, p))
    return result, mask


def _dropped_on_cpu(source: Tensor, mask: Tensor, p: float) -> Tensor:
    # native_dropout_cpu: multiply by the mask, then by the scale. It draws where p is 0 or 1, too.
    fill_tensor(mask, Bernoulli(1.0 - p))
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    dropped = local_of(source).mul(local_of(mask))
    # C++ rounds a Scalar to the dtype before it multiplies, unlike Tensor.mul_ in Python.
    return aten.mul_.Scalar(dropped, scale)  # type: ignore[no-any-return]


def _dropped_on_gpu(source: Tensor, mask: Tensor, p: float) -> Tensor:
    local_region(source)  # raises for inputs that are not dense: torch draws them in another order
    if p == 1.0:  # native_dropout_cuda returns before it draws
        local_of(mask).zero_()
        return torch.zeros_like(local_of(source))
    fill_tensor(mask, FusedDropout(p, source.dtype.itemsize))
    return functional.apply_fused_mask(local_of(source), local_of(mask), p)


def _normal_around(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    # ATen/native/DistributionTemplates.h, normal_out_impl: a standard normal, scaled, shifted.
    named = bind(operator, args, kwargs)
    mean, std = named["mean"], named["std"]
    source = mean if isinstance(mean, Tensor) else std
    with _errors_named(operator):
        _check_std(std, source.shape)
        result = empty_like(source, memory_format=torch.contiguous_format)
        if not isinstance(std, Tensor):
            return fill_tensor(result, Normal(0.0, std), named["generator"]).add_(mean)
        fill_tensor(result, Normal(0.0, 1.0), named["generator"])
        result.mul_(std).add_(mean)
        return result


def _check_std(std: Tensor | float, shape: torch.Size) -> None:
    if not isinstance(std, Tensor):
        return
    if torch.broadcast_shapes(std.shape, shape) != shape:
        raise ValueError(
            f"expected a std that expands to the shape {tuple(shape)} of mean, got"
            f" {tuple(std.shape)}; expand mean to the shape of both"
        )
    local = local_of(std)
    if not (local.is_meta or isinstance(local, FakeTensor)) and not bool((local >= 0.0).all()):
        raise ValueError("expected standard deviations >= 0, got an element of std below 0 or NaN")


def _poisson(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    drawn = _on_gathered(operator, args, kwargs)
    result = empty_like(args[0], memory_format=torch.contiguous_format)
    local = local_of(result)
    local.copy_(slice_of(drawn, local_region(result)).reshape(local.shape))
    return result


def _multinomial(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    drawn, source = _on_gathered(operator, args, kwargs), args[0]
    # Rows stay sharded; samples of sharded categories are replicated.
    placements = [
        placement if type(placement) is Shard and placement.dim == 0 < source.ndim - 1 else _REPLICA
        for placement in source.placements
    ]
    replicas = [_REPLICA] * source.device_mesh.ndim
    result = DTensor.from_local(drawn, source.device_mesh, replicas, run_check=False)
    return result.redistribute(placements=placements)


_REPLICA = Replicate()


def _on_gathered(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Draws the global result on every rank, of the gathered input.

    No rank could draw its part alone: how many words a number of ``poisson`` takes depends on its
    rate, and ``multinomial`` needs whole rows. The ranks' generators are equal, and stay so.
    """
    source = args[0]
    if is_active():  # GPUs use other algorithms
        raise_unsupported(operator, args, kwargs)
    if any(placement.is_partial() for placement in source.placements):
        raise _error(
            operator,
            f"expected an input of whole values, got {source.placements}, whose local values are"
            " summands; redistribute it to Replicate or Shard first",
        )
    if source.device_mesh.get_coordinate() is None:
        raise _error(
            operator,
            f"expected a rank of {source.device_mesh}, got one outside of it, whose generator"
            " cannot advance as those inside; call it on the ranks of the mesh",
        )
    first_draw_check(source.device_mesh, bind(operator, args, kwargs)["generator"])
    gathered = source.detach().full_tensor()
    if gathered.stride() != source.stride():  # it may determine the order of the draws
        single = gathered.new_empty_strided(source.shape, source.stride())
        gathered = single.copy_(gathered)
    drawn: Tensor = operator(gathered, *args[1:], **kwargs)
    return drawn


def raise_unsupported(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raises for an operator whose stream is not reproduced."""
    del args, kwargs
    raise _error(
        operator,
        "dist-rng does not reproduce this operator's stream; draw on a plain tensor and distribute"
        " it, or compose it from uniform_, normal_ or exponential_",
    )


def _upper_bound(named: Arguments) -> int:
    # Without a bound torch draws up to the largest integer of the dtype, inclusive.
    return int(named["to"]) if named["to"] is not None else largest_integer(named["self"].dtype) + 1


def bind(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns the arguments by name, defaults included."""
    schema = operator._schema.arguments
    named = {argument.name: argument.default_value for argument in schema}
    named.update(zip((argument.name for argument in schema), args, strict=False))
    return named | kwargs


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, name, None)  # some operators exist only in some releases of torch
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _error(operator: Any, reason: str) -> ValueError:
    return ValueError(f"{operator}: {reason}")


@contextmanager
def _errors_named(operator: Any) -> Iterator[None]:
    """Prefixes errors of the region or the backend with the operator's name."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{operator}: {error}") from error
