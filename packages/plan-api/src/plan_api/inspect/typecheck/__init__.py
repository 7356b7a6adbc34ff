"""Checks plans by the types of spmd_types, without a number."""

from plan_api.inspect.typecheck.check import typecheck

__all__ = ["typecheck"]
