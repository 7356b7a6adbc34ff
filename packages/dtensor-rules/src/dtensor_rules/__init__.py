"""DTensor dispatch in under a microsecond."""

__version__ = "0.1.0"
