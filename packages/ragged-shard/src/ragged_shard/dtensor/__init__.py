"""Constructs, describes and checkpoints DTensors with the placements of this package."""
