"""The values of `Plan.recompute` and `Plan.compile`, which plans store as text."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

__all__ = ["CHECKS", "RecomputePolicy", "check_backend", "check_recompute"]

RecomputePolicy: TypeAlias = Literal["full", "selective-op", "keep-dispatch"]


def check_recompute(what: str, policy: Any) -> None:
    """Refuses what is no policy of recomputation.

    Args:
        what: begins the message.
        policy: any value.

    Raises:
        ValueError: names the policies.
    """
    known = get_args(RecomputePolicy)
    if policy not in known:
        expected = " or ".join(map(repr, known))
        raise ValueError(
            f"{what}: policy: expected {expected}, got {policy!r}{_nearest(policy, known)}"
        )


def check_backend(what: str, backend: Any) -> None:
    """Refuses what is no registered backend of torch.compile.

    Args:
        what: begins the message.
        backend: any value.

    Raises:
        ValueError: names the backends.
    """
    if not isinstance(backend, str):
        raise ValueError(
            f"{what}: backend: expected the name of a backend of torch.compile, which a plan can "
            f"store, got {backend!r}; register it by torch._dynamo.register_backend, and give its "
            f"name"
        )
    from torch._dynamo import list_backends  # 1 s, which importing plan-api does not take

    known = list_backends(exclude_tags=None)
    if backend not in known:
        raise ValueError(
            f"{what}: backend: expected a backend of torch.compile, {', '.join(map(repr, known))}, "
            f"got {backend!r}{_nearest(backend, known)}"
        )


# By the option of an entry.
CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "policy": check_recompute,
    "backend": check_backend,
}


def _nearest(value: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(value), known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
