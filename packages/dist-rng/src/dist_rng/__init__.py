"""The random numbers one device would have drawn, on any placement and any number of ranks."""

__version__ = "0.1.0"
