// Says once per operator, or method, and reason that calls are left to torch (logs.py).
#pragma once

#include "dtensor_rules/python.h"
#include "dtensor_rules/stats.h"

namespace dtensor_rules {

// A Python function of (name, reason), or None.
void set_teller(py::object function);

// Tells it, takes the GIL for it; what was told is told again after OpStats::clear.
void tell(OpStats& stats, const char* name, Reason reason);

inline void tell_once(OpStats& stats, const char* name, Reason reason) {
  const uint32_t bit = uint32_t{1} << static_cast<unsigned>(reason);
  if ((stats.told.load(std::memory_order_relaxed) & bit) == 0) [[unlikely]] {
    tell(stats, name, reason);
  }
}

}  // namespace dtensor_rules
