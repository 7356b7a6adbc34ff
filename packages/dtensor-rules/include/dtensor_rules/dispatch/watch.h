// Torch's own tables: dicts that say how operators are sharded, which anybody may change. A plan
// that was made from what they said before must not run, and looking is to cost nothing.
#pragma once

#include "dtensor_rules/python.h"

namespace dtensor_rules {

// Watches these dicts from now on, in place of those watched before, and calls `changed` (no
// arguments) when a call finds one of them changed, before it is executed.
void watch(const std::vector<py::dict>& tables, py::object changed);

// Calls `changed` if a table has changed since the last time. Needs the GIL.
void check_watched();

}  // namespace dtensor_rules
