"""One collective where DTensor makes hundreds."""

__version__ = "0.1.0"
