// `OpDispatcher.wrap` without Python, for the results of calls that are torch's.
#pragma once

#include "dtensor_rules/python.h"

namespace dtensor_rules {

// torch's own function, which does what is not plain.
void set_native_wrap(py::object function);

// DTensors around a local result: a tensor, lists and tuples of them, or anything else, which stays
// what it is. `spec` is a DTensorSpec, a list or tuple of them, or None.
py::object wrap_result(PyObject* result, PyObject* spec);

}  // namespace dtensor_rules
