#include "dtensor_rules/dispatch/kernels.h"
#include "dtensor_rules/methods/methods.h"
#include "dtensor_rules/register.h"

namespace dtensor_rules {

namespace {

py::dict reasons(const OpStats& stats) {
  py::dict counts;
  for (size_t index = 0; index < stats.fallbacks.size(); ++index) {
    if (const uint64_t count = stats.fallbacks[index].load(); count != 0) {
      counts[reason_name(static_cast<Reason>(index))] = count;
    }
  }
  return counts;
}

void append(py::list& result, const std::string& name, const OpStats& stats) {
  const uint64_t rule = stats.rule, cache = stats.cache, miss = stats.miss;
  const py::dict left = reasons(stats);
  if (rule + cache + miss + left.size() != 0) {
    result.append(py::make_tuple(name, rule, cache, miss, left));
  }
}

// (name, rule, cache, miss, {reason: count}) of every operator and method that was called.
py::list counts() {
  py::list result;
  for (const auto& op : operators()) {
    append(result, op->name, op->stats);
  }
  for (size_t half = 0; half < static_cast<size_t>(Half::kCount); ++half) {
    append(result, half_name(static_cast<Half>(half)), half_stats(static_cast<Half>(half)));
  }
  return result;
}

// How many calls of each operator with typed kernels those kernels ran: for tests, because one that
// never runs is silent.
py::dict typed_counts() {
  py::dict result;
  for (const auto& op : operators()) {
    if (op->typed) {
      result[py::str(op->name)] = op->stats.typed.load();
    }
  }
  return result;
}

void clear_counts() {
  for (const auto& op : operators()) {
    op->stats.clear();
  }
  for (size_t half = 0; half < static_cast<size_t>(Half::kCount); ++half) {
    half_stats(static_cast<Half>(half)).clear();
  }
}

}  // namespace

void register_stats(py::module_& module) {
  module.def("counts", &counts);
  module.def("clear_counts", &clear_counts);
  module.def("typed_counts", &typed_counts);
}

}  // namespace dtensor_rules
