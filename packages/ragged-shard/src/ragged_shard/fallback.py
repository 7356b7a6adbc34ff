"""Fallbacks: operators without a rule for ragged inputs gather, warn, are counted, or raise."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement


class GatheredSpec(DTensorSpec):
    """The spec of an input that is gathered because an operator has no rule.

    Propagation is cached and redistribution is not, so what has to happen on every call is attached
    to the target spec of the redistribution.

    Attributes:
        operator: the name of the operator.
    """

    operator: str = "?"

    @classmethod
    def of(
        cls, spec: DTensorSpec, placements: tuple[Placement, ...], operator: str
    ) -> GatheredSpec:
        """Returns the spec to which an input of an operator is gathered."""
        gathered = cls(spec.mesh, placements, tensor_meta=spec.tensor_meta)
        gathered.operator = operator
        return gathered


class RaggedShardFallbackWarning(UserWarning):
    """Warns that an operator without a rule for ragged_shard's placements gathers its input."""


_counts: Counter[str] = Counter()
_strict = False


def fallbacks() -> Mapping[str, int]:
    """Returns how often each operator without a rule gathered an input, by its name."""
    return dict(_counts)


def reset_fallbacks() -> None:
    """Resets the counts; an operator warns again at its next fallback."""
    _counts.clear()


@contextmanager
def strict(*, enabled: bool = True) -> Iterator[None]:
    """Makes operators without a rule raise instead of gathering, within the block.

    The setting applies to all threads, as backward runs on its own.

    Examples:
        >>> with ragged_shard.strict():
        ...     loss = model(batch)
    """
    global _strict
    before, _strict = _strict, enabled
    try:
        yield
    finally:
        _strict = before


def record_fallback(spec: DTensorSpec, current: DTensorSpec) -> None:
    """Counts a redistribution if it is a fallback, before anything is sent.

    Raises:
        RuntimeError: in strict mode.
    """
    if not isinstance(spec, GatheredSpec):
        return
    placements = ", ".join(map(repr, current.placements))
    if _strict:
        raise RuntimeError(
            f"ragged_shard: {spec.operator} has no rule for [{placements}], and "
            f"ragged_shard.strict() forbids gathering; redistribute the input before the operator, "
            f"or call it outside of ragged_shard.strict()"
        )
    if not _counts[spec.operator]:
        warnings.warn(
            f"ragged_shard: {spec.operator} has no rule for [{placements}], so its input is "
            f"gathered on every call; redistribute it before the operator if that is intended "
            f"(ragged_shard.fallbacks() counts gathers, ragged_shard.strict() forbids them)",
            RaggedShardFallbackWarning,
            stacklevel=3,
        )
    _counts[spec.operator] += 1
