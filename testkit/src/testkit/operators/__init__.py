"""Calls for tests of DTensor dispatch: 160 operators with placements and dtypes."""

from testkit.operators.cases import OperatorCase, operator_cases
from testkit.operators.operator import FLOATS, OpEntry, OpInput
from testkit.operators.table import OPERATORS

__all__ = [
    "FLOATS",
    "OPERATORS",
    "OpEntry",
    "OpInput",
    "OperatorCase",
    "operator_cases",
]
