#include "dtensor_rules/dispatch/explicit_only.h"

namespace dtensor_rules {

namespace {

py::object& active() {
  static auto* local = new py::object(py::none());  // outlives the interpreter's end
  return *local;
}

}  // namespace

void set_explicit_only(py::object local) {
  active() = std::move(local);
}

bool is_explicit_only() {
  static PyObject* const name = PyUnicode_InternFromString("_active");
  if (active().is_none()) {
    return false;
  }
  const auto context = py::reinterpret_steal<py::object>(PyObject_GetAttr(active().ptr(), name));
  if (!context) {
    PyErr_Clear();  // this thread has never been within one
    return false;
  }
  return !context.is_none();
}

}  // namespace dtensor_rules
