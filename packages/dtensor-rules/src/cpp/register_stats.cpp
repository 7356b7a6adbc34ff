#include "dtensor_rules/dispatch.h"
#include "dtensor_rules/register.h"

namespace dtensor_rules {

namespace {

py::dict reasons(const OpStats& stats) {
  py::dict counts;
  for (size_t index = 0; index < stats.left.size(); ++index) {
    if (const uint64_t count = stats.left[index].load(); count != 0) {
      counts[reason_name(static_cast<Reason>(index))] = count;
    }
  }
  return counts;
}

// (name, rule, cache, miss, {reason: count}) of every operator that was called.
py::list counts() {
  py::list result;
  for (const auto& op : operators()) {
    const uint64_t rule = op->stats.rule, cache = op->stats.cache, miss = op->stats.miss;
    const py::dict left = reasons(op->stats);
    if (rule + cache + miss + left.size() != 0) {
      result.append(py::make_tuple(op->name, rule, cache, miss, left));
    }
  }
  return result;
}

void clear_counts() {
  for (const auto& op : operators()) {
    op->stats.clear();
  }
}

}  // namespace

void register_stats(py::module_& module) {
  module.def("counts", &counts);
  module.def("clear_counts", &clear_counts);
}

}  // namespace dtensor_rules
