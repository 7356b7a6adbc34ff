"""Parallelism said once, outside the model."""

from plan_api import zoo
from plan_api.debug import breakpoint  # noqa: A004  # its name in torch as well
from plan_api.deferred import deferred_init
from plan_api.entry import Entry
from plan_api.explain import Diff, Explanation, diff, explain
from plan_api.lowered import Lowered, lower
from plan_api.parallelize import Installed, installed, parallelize, uninstall
from plan_api.phase import Phase
from plan_api.plan import Plan
from plan_api.static.compare import Difference, StaticError
from plan_api.static.generate import generate_static
from plan_api.track import Record, track
from plan_api.view import view

__all__ = [
    "Diff",
    "Difference",
    "Entry",
    "Explanation",
    "Installed",
    "Lowered",
    "Phase",
    "Plan",
    "Record",
    "StaticError",
    "breakpoint",
    "deferred_init",
    "diff",
    "explain",
    "generate_static",
    "installed",
    "lower",
    "parallelize",
    "track",
    "uninstall",
    "view",
    "zoo",
]
__version__ = "0.1.0"
