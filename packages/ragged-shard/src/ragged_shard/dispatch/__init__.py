"""Decides what operators do to the placements of this package."""
