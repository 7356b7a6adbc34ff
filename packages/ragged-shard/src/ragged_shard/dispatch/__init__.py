"""Sharding propagation of operators with placements of this package."""
