"""Parallelism said once, outside the model."""

from plan_api.parallelize import Installed, Lowered, installed, lower, parallelize
from plan_api.phase import Phase
from plan_api.plan import Entry, Plan

__all__ = ["Entry", "Installed", "Lowered", "Phase", "Plan", "installed", "lower", "parallelize"]
__version__ = "0.1.0"
