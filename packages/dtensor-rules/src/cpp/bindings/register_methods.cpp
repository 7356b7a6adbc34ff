#include <torch/csrc/Exceptions.h>

#include "dtensor_rules/methods/methods.h"
#include "dtensor_rules/register.h"
#include "dtensor_rules/methods/wrap_result.h"

namespace dtensor_rules {

namespace {

// A method as a C function of positional arguments: half the cost of pybind11's own calls.
template <auto Method, size_t... Index>
PyObject* call_method(PyObject* const* arguments, std::index_sequence<Index...>) {
  try {
    const torch::PyWarningHandler warnings_become_python;
    return Method(arguments[Index]...).release().ptr();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

template <auto Method, size_t Count>
PyObject* method_function(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(Count)) {
    PyErr_Format(PyExc_TypeError, "%zu arguments wanted, %zd given", Count, count);
    return nullptr;
  }
  return call_method<Method>(arguments, std::make_index_sequence<Count>());
}

template <auto Method, size_t Count>
PyMethodDef method_definition(const char* name) {
  return {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method_function<Method, Count>)),
      METH_FASTCALL, nullptr};
}

}  // namespace

void register_methods(py::module_& module) {
  static std::array<PyMethodDef, 5> methods = {
      method_definition<redistribute, 3>("redistribute"),
      method_definition<from_local, 5>("from_local"),
      method_definition<to_local, 1>("to_local"),
      method_definition<wrap_result, 2>("wrap_result"),
      PyMethodDef{nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(module.ptr(), methods.data()) != 0) {
    throw py::error_already_set();
  }
  module.def(
      "learn_redistribute",
      [](const py::handle& dtensor, const py::handle& placements, const py::object& spec,
         const py::object& transform) {
        learn_redistribute(dtensor.ptr(), placements.ptr(), spec, transform);
      });
  module.def(
      "learn_from_local",
      [](const py::handle& local, const py::handle& mesh, const py::handle& placements,
         const py::handle& shape, const py::handle& stride, const py::object& spec) {
        learn_from_local(
            local.ptr(), mesh.ptr(), placements.ptr(), shape.ptr(), stride.ptr(), spec);
      });
  module.def("set_methods_on", &set_methods_on);
  module.def("set_native_wrap", &set_native_wrap);
  module.def(
      "set_backwards",
      [](py::object of_redistribute, py::object of_from_local, py::object of_to_local) {
        set_backward(Half::kRedistributeGrad, std::move(of_redistribute));
        set_backward(Half::kFromLocalGrad, std::move(of_from_local));
        set_backward(Half::kToLocalGrad, std::move(of_to_local));
      },
      py::kw_only(), py::arg("redistribute"), py::arg("from_local"), py::arg("to_local"));
}

}  // namespace dtensor_rules
