"""Generates a plan for static mode by tracing steps of Eager."""

from plan_api.static.generation.communication import plan_communication
from plan_api.static.generation.generate import generate_static

__all__ = ["generate_static", "plan_communication"]
