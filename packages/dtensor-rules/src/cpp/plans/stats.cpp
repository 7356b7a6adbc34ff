#include "dtensor_rules/plans/stats.h"

#include <stdexcept>
#include <string>

namespace dtensor_rules {

namespace {

constexpr std::array<const char*, static_cast<size_t>(Reason::kCount)> kNames = {
    "none",         "mode",        "subclass",    "local subclass", "plain tensor",
    "no DTensor",   "symint",      "not in mesh", "handler",        "random",
    "unsupported",  "propagation", "explicit redistribution only",  "checking",
};

}  // namespace

const char* reason_name(Reason reason) {
  return kNames[static_cast<size_t>(reason)];
}

Reason reason_of(const char* name) {
  for (size_t index = 0; index < kNames.size(); ++index) {
    if (std::string(kNames[index]) == name) {
      return static_cast<Reason>(index);
    }
  }
  throw std::invalid_argument(std::string("dtensor_rules: no reason is called '") + name + "'");
}

namespace {

static_assert(static_cast<size_t>(Reason::kCount) <= 32, "OpStats::logged has a bit per reason");

py::object& fallback_logger() {
  static auto* function = new py::object(py::none());  // outlives the interpreter's end
  return *function;
}

}  // namespace

void set_fallback_logger(py::object function) {
  fallback_logger() = std::move(function);
}

void count_fallback(OpStats& stats, const char* name, Reason reason) {
  stats.fallbacks[static_cast<size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  const uint32_t bit = uint32_t{1} << static_cast<unsigned>(reason);
  if ((stats.logged.load(std::memory_order_relaxed) & bit) != 0 ||
      (stats.logged.fetch_or(bit, std::memory_order_relaxed) & bit) != 0) {
    return;
  }
  const Gil gil;
  if (const py::object function = fallback_logger(); !function.is_none()) {
    function(name, reason_name(reason));
  }
}

}  // namespace dtensor_rules
