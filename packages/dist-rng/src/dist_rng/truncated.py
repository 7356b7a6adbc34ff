"""trunc_normal_ without DTensor: torch's own composition, drawing by region."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dist_rng.draws import Normal, Uniform
from dist_rng.functional import fill
from dist_rng.region import Region

aten = torch.ops.aten


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
    """Fill ``local`` from the normal distribution cut to [a, b], as ``nn.init.trunc_normal_``.

    torch draws again until no element of the whole tensor is rejected (from 2.12 on), so the
    ranks that hold parts of it have to agree on every round: one small all-reduce each.

    Args:
        local: floating point; ``region`` says what it holds.
        region: of ``local`` in the global tensor.
        mean: of the normal distribution, before the cut.
        std: its standard deviation.
        a: lower end of the cut.
        b: upper end.
        group: the ranks that together hold the whole tensor; None where ``local`` does.
        generator: as for the other fills.

    Raises:
        ValueError: ``local`` is only a part and no group was given.
    """
    if group is None and region.numel != region.global_numel:
        raise ValueError(
            f"trunc_normal_ of {region.numel} out of {region.global_numel} elements: the ranks that"
            " hold the others must agree on its rounds; give their process group as `group`"
        )
    with _ByRegion(region, group, generator):
        nn.init.trunc_normal_(local, mean, std, a, b)
    return local


class _ByRegion(TorchDispatchMode):
    """Every tensor drawn inside is a local tensor of ``region``."""

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
        result = func(*args, **(kwargs or {}))
        if func is aten.any.default and self._group is not None:
            found = result.int()
            dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
            return found.bool()
        return result
