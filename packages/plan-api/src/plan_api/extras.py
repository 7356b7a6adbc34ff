"""The other packages, where they are installed."""

from __future__ import annotations

import logging
from importlib.util import find_spec

__all__ = ["use_extras"]

_log = logging.getLogger("plan_api")


def use_extras() -> tuple[str, ...]:
    """Switches on what is installed, process-wide, and says so.

    dist-rng: random numbers are those of one device. dtensor-rules: operators cost less.
    """
    used = []
    if find_spec("dist_rng"):
        import dist_rng

        dist_rng.install()
        used.append("dist-rng")
    if find_spec("dtensor_rules"):
        import dtensor_rules

        dtensor_rules.enable()
        used.append("dtensor-rules")
    if find_spec("fused_comm"):
        used.append("fused-comm")
    _log.info("plan-api uses %s", ", ".join(used) or "torch alone")
    return tuple(used)
