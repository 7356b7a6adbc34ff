"""The rules that are there from the start, in their order."""

from __future__ import annotations

from dtensor_rules.registry.builtin.add import ADD_PARTIAL, ADD_TO_PARTIAL
from dtensor_rules.registry.builtin.equal import EQUAL
from dtensor_rules.registry.builtin.out_given import OUT_GIVEN
from dtensor_rules.registry.builtin.out_partial import OUT_PARTIAL

BUILTIN = (EQUAL, ADD_PARTIAL, ADD_TO_PARTIAL, OUT_GIVEN, OUT_PARTIAL)
