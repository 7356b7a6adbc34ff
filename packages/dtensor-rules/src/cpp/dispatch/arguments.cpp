#include "dtensor_rules/dispatch/arguments.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

namespace dtensor_rules {

namespace {

py::object borrowed(void* object) {
  return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(object));
}

py::object python_value(const c10::Argument& argument, const c10::IValue& value) {
  if (value.isInt()) {
    auto type = argument.real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    const auto number = value.toInt();
    switch (type->kind()) {
      case c10::TypeKind::ScalarTypeType:
        return borrowed(torch::getTHPDtype(static_cast<c10::ScalarType>(number)));
      case c10::TypeKind::LayoutType:
        return borrowed(torch::getTHPLayout(static_cast<c10::Layout>(number)));
      case c10::TypeKind::MemoryFormatType:
        return borrowed(
            torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(number)));
      default:
        break;
    }
  }
  return torch::jit::toPyObject(value);
}

bool is_default(const c10::Argument& argument, const c10::IValue& value) {
  const auto& fallback = argument.default_value();
  return fallback.has_value() && *fallback == value;
}

}  // namespace

PythonArguments python_arguments(
    const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  const auto& declared = schema.arguments();
  size_t positional = 0;
  while (positional < declared.size() && !declared[positional].kwarg_only()) {
    ++positional;
  }
  size_t given = positional;
  while (given > 0 && is_default(declared[given - 1], arguments[given - 1])) {
    --given;
  }
  PythonArguments result{py::tuple(given), py::dict()};
  for (size_t index = 0; index < given; ++index) {
    result.args[index] = python_value(declared[index], arguments[index]);
  }
  for (size_t index = positional; index < declared.size(); ++index) {
    if (!is_default(declared[index], arguments[index])) {
      result.kwargs[py::str(declared[index].name())] =
          python_value(declared[index], arguments[index]);
    }
  }
  return result;
}

}  // namespace dtensor_rules
