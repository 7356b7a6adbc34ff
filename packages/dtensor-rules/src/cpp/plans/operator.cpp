#include "dtensor_rules/plans/operator.h"

namespace dtensor_rules {

namespace {

uint64_t next_id() {
  static uint64_t last = 0;  // under the GIL
  return ++last;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// As torch/distributed/tensor decides it: by the name's underscore. `_foreach_add_` is one too, and
// returns nothing.
bool in_place(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  return !name.empty() && name.back() == '_' && !schema.arguments().empty() &&
      writes(schema.arguments()[0]);
}

// As OpOverload._schema._is_view_op: an argument is aliased and nothing is written.
bool view(const c10::FunctionSchema& schema) {
  bool aliases = false;
  for (const auto& argument : schema.arguments()) {
    if (writes(argument)) {
      return false;
    }
    aliases = aliases || argument.alias_info() != nullptr;
  }
  return aliases;
}

}  // namespace

Operator::Operator(
    c10::OperatorHandle of, py::object overload_object, std::vector<bool> flags)
    : handle(std::move(of)),
      overload(std::move(overload_object)),
      name(py::str(overload)),
      id(next_id()),
      arguments(handle.schema().arguments().size()),
      returns(handle.schema().returns().size()),
      is_in_place(in_place(handle.schema())),
      is_view(view(handle.schema())) {
  read_by_value(std::move(flags));
}

void Operator::read_by_value(std::vector<bool> flags) {
  TORCH_CHECK(
      flags.size() == arguments, name, ": ", flags.size(), " flags for ", arguments, " arguments");
  by_value = std::move(flags);
}

}  // namespace dtensor_rules
