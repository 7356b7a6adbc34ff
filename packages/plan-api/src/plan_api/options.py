"""The options of `parallelize`, and the optional packages that it uses."""

from __future__ import annotations

import logging
import operator
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ParallelizeOptions", "enable_extra", "warn_of_slow_planning"]

_log = logging.getLogger("plan_api")

_BUCKET_MB = 25.0
# By the name of the package: its module, and the extra of this package that installs it.
_KNOWN = {
    "dist-rng": ("dist_rng", "rng"),
    "dtensor-rules": ("dtensor_rules", "rules"),
    "fused-comm": ("fused_comm", "comm"),
}


@dataclass(frozen=True)
class ParallelizeOptions:
    """The arguments of a call of `parallelize`; their text is compared between ranks.

    Attributes:
        mode: ``"eager"`` or ``"static"``.
        guard_steps: the number of calls that are validated against Eager; 0 in Eager.
        src_data_rank: as in `parallelize`.
        bucket_mb: as in `parallelize`; None if not given.
        extras: the names of the optional packages to use.
        warns: whether to warn about gradients that are reduced one by one, as the caller has not
            chosen.
        overlap: as in `parallelize`.
    """

    mode: Literal["eager", "static"]
    guard_steps: int
    src_data_rank: int | None
    bucket_mb: float | None
    extras: tuple[str, ...]
    warns: bool
    overlap: str | None = None

    @property
    def fused_mb(self) -> float | None:
        """Megabytes of a bucket of fused-comm; None if it is not in use."""
        if "fused-comm" not in self.extras:
            return None
        return _BUCKET_MB if self.bucket_mb is None else self.bucket_mb

    @classmethod
    def checked(
        cls,
        mesh: DeviceMesh,
        mode: Literal["eager", "static"],
        guard_steps: int | None,
        src_data_rank: int | None,
        bucket_mb: float | None,
        use: Sequence[str] | None,
        overlap: str | None = None,
    ) -> ParallelizeOptions:
        """Checks the arguments of a call.

        Args:
            mesh: of the plan.
            mode: as in `parallelize`, like the others.
            guard_steps: None: 1 in static mode.
            src_data_rank: along each axis of the mesh.
            bucket_mb: None: the default.
            use: None: the packages that are installed.
            overlap: the name of an axis of the mesh, which `check_overlaps` checks.

        Raises:
            ValueError: an option has no such value, or no effect beside another one.
        """
        if mode not in ("eager", "static"):
            raise ValueError(f"parallelize: mode={mode!r} must be 'eager' or 'static'")
        steps = 1 if mode == "static" else 0
        if guard_steps is not None:
            steps = _index("guard_steps", guard_steps)
        if steps < 0:
            raise ValueError(f"parallelize: guard_steps expected 0 or more, got {steps}")
        if steps and mode == "eager":
            raise ValueError(
                f"parallelize: expected mode='static' for guard_steps, got guard_steps={steps} and "
                f"mode='eager', which has nothing to compare with; leave guard_steps out"
            )
        if src_data_rank is not None:
            rank, size = _index("src_data_rank", src_data_rank), min(mesh.shape)
            if not 0 <= rank < size:
                raise ValueError(
                    f"parallelize: src_data_rank expected a rank along each axis of the mesh, of "
                    f"which the smallest has {size}, got {rank}; give one below {size}, or None"
                )
        extras = _choose_extras(use)
        if bucket_mb is not None:
            _check_bucket(bucket_mb, extras)
        return cls(mode, steps, src_data_rank, bucket_mb, extras, use is None, overlap)


def _check_bucket(bucket_mb: float, extras: Collection[str]) -> None:
    if not bucket_mb > 0:
        raise ValueError(f"parallelize: bucket_mb expected a number above 0, got {bucket_mb!r}")
    if "fused-comm" not in extras:
        raise ValueError(
            f"parallelize: expected fused-comm for buckets, got bucket_mb={bucket_mb} without it: "
            f"pip install 'plan-api[comm]' and name 'fused-comm' in use= if that is given, or "
            f"leave bucket_mb out"
        )


def _index(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"parallelize: {name} expected an integer, got {value!r}") from None


def _choose_extras(use: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the optional packages to use, in a fixed order, without importing them."""
    if use is None:
        found = tuple(name for name, (module, _) in _KNOWN.items() if find_spec(module))
        _log.info("plan-api uses %s", ", ".join(found) or "torch alone")
        return found
    names = ", ".join(map(repr, _KNOWN))
    if isinstance(use, str):
        raise ValueError(f"parallelize: use= expected a sequence of {names}, got {use!r}")
    for name in use:
        if name not in _KNOWN:
            raise ValueError(f"parallelize: use= expected names among {names}, got {name!r}")
        module, extra = _KNOWN[name]
        if not find_spec(module):
            raise ValueError(
                f"parallelize: use= expected installed packages, got {name!r}, which is not: "
                f"pip install 'plan-api[{extra}]', or leave it out"
            )
    return tuple(name for name in _KNOWN if name in use)


def enable_extra(name: str) -> Callable[[], None] | None:
    """Enables a package for the process.

    Args:
        name: of an installed package.

    Returns:
        the function that disables it; None if it was enabled already, or has nothing to enable.
    """
    if name == "dist-rng":
        import dist_rng

        if not dist_rng.is_installed():
            dist_rng.install()
            return dist_rng.uninstall
    if name == "dtensor-rules":
        import dtensor_rules

        if not dtensor_rules.is_enabled():
            dtensor_rules.enable()
            return dtensor_rules.disable
    return None


def warn_of_slow_planning(mesh: DeviceMesh, extras: Sequence[str]) -> None:
    """Warns where DTensor operators are planned by torch alone on three mesh axes or more.

    Torch compares all combinations of placements on all axes, for every operator: a first step can
    take minutes.

    Args:
        mesh: of the plan.
        extras: the optional packages in use.
    """
    enabled = "dtensor_rules" in sys.modules and sys.modules["dtensor_rules"].is_enabled()
    if mesh.ndim < 3 or "dtensor-rules" in extras or enabled:
        return
    module, extra = _KNOWN["dtensor-rules"]
    remedy = (
        "add 'dtensor-rules' to use="
        if find_spec(module)
        else f"install dtensor-rules (pip install 'plan-api[{extra}]')"
    )
    warnings.warn(
        f"parallelize: the plan's mesh has {mesh.ndim} axes, on which torch alone can take minutes "
        f"to plan the operators of the first step; {remedy}, which plans them in milliseconds",
        stacklevel=4,  # where parallelize is called
    )
