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

}  // namespace dtensor_rules
