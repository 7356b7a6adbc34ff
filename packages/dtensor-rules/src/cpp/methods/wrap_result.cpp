#include "dtensor_rules/methods/wrap_result.h"

#include "dtensor_rules/methods/methods.h"
#include "dtensor_rules/dispatch/wrap.h"

namespace dtensor_rules {

namespace {

py::object& native_wrap() {
  static auto* function = new py::object(py::none());  // outlives the interpreter's end
  return *function;
}

bool is_sequence(PyObject* object) {
  return PyList_CheckExact(object) || PyTuple_CheckExact(object);
}

// Whether nothing but a wrapper has to be made: no subclass, which Python would have to see, and
// nothing that autograd or a transform knows of.
bool is_plain(const at::Tensor& tensor) {
  return !tensor.key_set().has(c10::DispatchKey::Python) &&
      !tensor.key_set().has(c10::DispatchKey::Functionalize) &&
      tensor.layout() == c10::Layout::Strided && !tensor.requires_grad();
}

py::object wrap_tensor(PyObject* result, PyObject* spec_object) {
  const at::Tensor& tensor = THPVariable_Unpack(result);
  if (Py_TYPE(spec_object) == torch_classes().dtensor_spec && is_plain(tensor)) {
    if (const SpecPtr spec = intern_shared(spec_object); !spec->symbolic) {
      return py::reinterpret_steal<py::object>(
          THPVariable_Wrap(wrap(tensor, *spec, spec_object)));
    }
  }
  return native_wrap()(py::handle(result), py::handle(spec_object));
}

py::object wrap_sequence(PyObject* results, PyObject* specs) {
  const Py_ssize_t count =
      std::min(PySequence_Fast_GET_SIZE(results), PySequence_Fast_GET_SIZE(specs));
  const bool is_list = PyList_CheckExact(results) != 0;
  auto wrapped = py::reinterpret_steal<py::object>(is_list ? PyList_New(count) : PyTuple_New(count));
  for (Py_ssize_t index = 0; index < count; ++index) {
    PyObject* one =
        wrap_result(
            PySequence_Fast_GET_ITEM(results, index), PySequence_Fast_GET_ITEM(specs, index))
            .release()
            .ptr();
    if (is_list) {
      PyList_SET_ITEM(wrapped.ptr(), index, one);
    } else {
      PyTuple_SET_ITEM(wrapped.ptr(), index, one);
    }
  }
  return wrapped;
}

}  // namespace

void set_native_wrap(py::object function) {
  native_wrap() = std::move(function);
}

py::object wrap_result(PyObject* result, PyObject* spec) {
  if (unusual_state() != Reason::kNone) {
    return native_wrap()(py::handle(result), py::handle(spec));
  }
  if (THPVariable_CheckExact(result) && spec != Py_None) {
    return wrap_tensor(result, spec);
  }
  if (is_sequence(result) && is_sequence(spec)) {
    return wrap_sequence(result, spec);
  }
  if (result == Py_None || PyBool_Check(result) || PyLong_CheckExact(result) ||
      PyFloat_CheckExact(result)) {
    return py::reinterpret_borrow<py::object>(result);
  }
  return native_wrap()(py::handle(result), py::handle(spec));
}

}  // namespace dtensor_rules
