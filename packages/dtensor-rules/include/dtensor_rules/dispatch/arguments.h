// A call's arguments as Python sees them.
#pragma once

#include "dtensor_rules/python.h"

namespace dtensor_rules {

struct PythonArguments {
  py::tuple args;
  py::dict kwargs;
};

// As torch hands them to `__torch_dispatch__`: trailing defaults left out, keyword-only arguments
// by name, and dtypes, layouts and memory formats as their Python objects.
PythonArguments python_arguments(
    const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments);

}  // namespace dtensor_rules
