"""A group of tensors in one distributed buffer."""

__version__ = "0.1.0"
