"""The optional packages that `parallelize` uses, chosen by ``use=``."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["choose_extras", "enable_extra", "warn_of_slow_planning"]

_log = logging.getLogger("plan_api")

# By the name of the package: its module, and the extra of this package that brings it.
_KNOWN = {
    "dist-rng": ("dist_rng", "rng"),
    "dtensor-rules": ("dtensor_rules", "rules"),
    "fused-comm": ("fused_comm", "comm"),
}


def choose_extras(use: Sequence[str] | None) -> tuple[str, ...]:
    """The optional packages to use, in a fixed order; imports and changes nothing.

    Args:
        use: names of packages; None: all that are installed.

    Raises:
        ValueError: a name is unknown, or its package is not installed.
    """
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
    """Switches a package on for the process.

    Args:
        name: of an installed package.

    Returns:
        what switches it off again; None where it was on already, or switches nothing on.
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
        stacklevel=3,
    )
