"""The trainer: ``python -m integration.train --help``."""
