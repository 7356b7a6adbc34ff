"""Placements that stock DTensor lacks, and the planner of their layouts."""

__version__ = "0.1.0"
