"""Asynchronous tensor parallelism: communication beside the products of Linears."""

from plan_api.ops.overlap.install import OverlappedSites

__all__ = ["OverlappedSites"]
