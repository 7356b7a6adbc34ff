// Logs once per operator, or method, and reason that calls fall back to torch (logs.py).
#pragma once

#include "dtensor_rules/python.h"
#include "dtensor_rules/plans/stats.h"

namespace dtensor_rules {

// A Python function of (name, reason), or None.
void set_fallback_logger(py::object function);

// Calls it, with the GIL; what was logged is logged again after OpStats::clear.
void log_fallback(OpStats& stats, const char* name, Reason reason);

inline void log_fallback_once(OpStats& stats, const char* name, Reason reason) {
  const uint32_t bit = uint32_t{1} << static_cast<unsigned>(reason);
  if ((stats.logged.load(std::memory_order_relaxed) & bit) == 0) [[unlikely]] {
    log_fallback(stats, name, reason);
  }
}

}  // namespace dtensor_rules
