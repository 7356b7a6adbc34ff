"""Operators without a rule for ragged inputs: they gather, warn, are counted, can be refused."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement


class GatheredSpec(DTensorSpec):
    """The spec of an input that is gathered because the operator, which it names, has no rule.

    Propagation is cached, redistribution is not: so what must happen on every call is attached to
    the target spec of the redistribution.
    """

    operator: str = "?"

    @classmethod
    def of(
        cls, spec: DTensorSpec, placements: tuple[Placement, ...], operator: str
    ) -> GatheredSpec:
        """What a spec is gathered to, and for which operator."""
        gathered = cls(spec.mesh, placements, tensor_meta=spec.tensor_meta)
        gathered.operator = operator
        return gathered


class RaggedShardFallbackWarning(UserWarning):
    """An operator has no rule for a placement of ragged_shard, so its input was gathered."""


_counts: Counter[str] = Counter()
_strict = False


def fallbacks() -> Mapping[str, int]:
    """Returns how often each operator without a rule gathered an input: name to count, a copy."""
    return dict(_counts)


def reset_fallbacks() -> None:
    """Forgets the counts; an operator warns again at its next fallback."""
    _counts.clear()


@contextmanager
def strict(*, enabled: bool = True) -> Iterator[None]:
    """Within the block an operator without a rule raises instead of gathering.

    The setting is the process's, for backward runs on threads of its own.

    Example:
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
    """Counts a redistribution if it is a fallback; called before anything is sent.

    Raises:
        RuntimeError: in strict mode.
    """
    if not isinstance(spec, GatheredSpec):
        return
    placements = ", ".join(map(repr, current.placements))
    if _strict:
        raise RuntimeError(
            f"ragged_shard: {spec.operator} has no rule for [{placements}] and strict mode forbids "
            f"gathering; redistribute the input yourself, or leave `ragged_shard.strict()`"
        )
    if not _counts[spec.operator]:
        warnings.warn(
            f"ragged_shard: {spec.operator} has no rule for [{placements}], so its input is "
            f"gathered on every call; redistribute it yourself if that is meant "
            f"(ragged_shard.fallbacks() counts, ragged_shard.strict() forbids)",
            RaggedShardFallbackWarning,
            stacklevel=3,
        )
    _counts[spec.operator] += 1
