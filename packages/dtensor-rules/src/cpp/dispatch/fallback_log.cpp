#include "dtensor_rules/dispatch/fallback_log.h"

namespace dtensor_rules {

static_assert(static_cast<size_t>(Reason::kCount) <= 32, "OpStats::logged has a bit per reason");

namespace {

py::object& logger() {
  static auto* function = new py::object(py::none());  // outlives the interpreter's end
  return *function;
}

}  // namespace

void set_fallback_logger(py::object function) {
  logger() = std::move(function);
}

void log_fallback(OpStats& stats, const char* name, Reason reason) {
  const uint32_t bit = uint32_t{1} << static_cast<unsigned>(reason);
  const bool first = (stats.logged.fetch_or(bit, std::memory_order_relaxed) & bit) == 0;
  if (!first) {
    return;
  }
  const Gil gil;
  if (const py::object function = logger(); !function.is_none()) {
    function(name, reason_name(reason));
  }
}

}  // namespace dtensor_rules
