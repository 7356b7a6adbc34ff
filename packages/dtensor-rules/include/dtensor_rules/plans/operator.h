// What is known of an operator before it is called.
#pragma once

#include <string>
#include <vector>

#include "dtensor_rules/python.h"
#include "dtensor_rules/plans/stats.h"

namespace dtensor_rules {

struct Operator {
  Operator(c10::OperatorHandle of, py::object overload_object, std::vector<bool> flags);

  // Sets `by_value`; keys made before say something else, and their plans must be forgotten.
  void read_by_value(std::vector<bool> flags);

  c10::OperatorHandle handle;
  py::object overload;  // torch.ops.aten.add.Tensor
  std::string name;     // "aten.add.Tensor"
  uint64_t id;          // begins its keys
  size_t arguments;
  size_t returns;
  // Per argument: whether a number there is part of the key with its value, or with its type only.
  std::vector<bool> by_value;
  bool is_in_place;  // returns its first argument
  bool is_view;      // the result shares the first argument's storage
  OpStats stats;
  bool installed = false;  // has a kernel now
  bool typed = false;      // and that is a typed one (typed.h)
};

}  // namespace dtensor_rules
