// The way of a call: gate, key, plan, execution; or torch's own dispatch, untouched.
#pragma once

#include "dtensor_rules/operator.h"

namespace dtensor_rules {

// Registers a kernel of this library for the operator, at the `Python` dispatch key. Returns false
// where it has one already. `planner` is planning.plan: what it returns, plan.h reads.
bool install_kernel(const py::object& overload, std::vector<bool> by_value);
void set_planner(py::object planner);
// Takes all kernels away: the dispatcher is as before.
void remove_kernels();

// The operators with a kernel, by name; they outlive the kernels, with their counts.
const std::vector<std::unique_ptr<Operator>>& operators();

// The key that a call would have, as words; for tests against the Python reference.
std::vector<uint64_t> key_words(const py::object& overload, const py::tuple& arguments);

// The checking mode: a Python function of (overload, args, kwargs) that does calls in place of the
// library, and compares; None switches it off (checking.py).
void set_checker(py::object checker);

// What this thread does with its calls until told otherwise.
enum class Path : uint8_t {
  kAsSet,     // checked where a checker is set
  kUnchecked, // planned and executed, without the checker
  kTorch,     // left to torch, counted as `checking`
};
// Sets it; what it was before.
Path set_path(Path path);

}  // namespace dtensor_rules
