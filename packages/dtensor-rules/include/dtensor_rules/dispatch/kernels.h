// The library's kernels in torch's dispatcher.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "dtensor_rules/plans/operator.h"

namespace dtensor_rules {

// Registers a kernel of this library for the operator at the `Python` dispatch key, and for one with
// typed kernels (typed.h) at `PythonTLSSnapshot` too. Returns false where it has one already.
bool install_kernel(const py::object& overload, std::vector<bool> by_value);
// Takes all kernels of `install_kernel` away: the dispatcher is as before.
void remove_kernels();

// Registers kernels for the functional all_gathers of CPU tensors (cpu_gathers.cpp), or takes them
// away; nothing happens where that is so already.
void set_cpu_gathers(bool on);

// The operators with a kernel; they outlive the kernels, with their counts.
const std::vector<std::unique_ptr<Operator>>& operators();
// The one of that name, as "aten.add.Tensor"; null where none has had a kernel.
Operator* find_operator(const std::string& name);

// The key that a call would have, as words; for tests against the Python reference.
std::vector<uint64_t> key_words(const py::object& overload, const py::tuple& arguments);

}  // namespace dtensor_rules
