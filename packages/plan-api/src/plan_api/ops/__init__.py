"""Operators and modules that DTensor alone computes otherwise, or not at all."""
