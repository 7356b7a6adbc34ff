"""Parallelism said once, outside the model."""

__version__ = "0.1.0"
