"""Moves local tensors from one set of placements to another."""
