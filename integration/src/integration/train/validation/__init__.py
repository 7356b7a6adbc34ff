"""Validates the options of a run before a process, a model or a file is created.

An option takes effect or is refused. Refusals are in three places: `option_rules.RULES` has pairs
of options of which one disables the other; `checks` depend on attributes of a system or a model;
and the ``check`` of a system validates degrees.
"""

from integration.train.validation.checks import COMPUTE_DTYPES, ValidatedRun, validate
from integration.train.validation.option_rules import RULES, OptionRule

__all__ = ["COMPUTE_DTYPES", "RULES", "OptionRule", "ValidatedRun", "validate"]
