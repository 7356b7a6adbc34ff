// What this library needs to know of Python's DTensor: its classes, and where its slots lie.
#pragma once

#include "dtensor_rules/compat.h"

namespace dtensor_rules {

namespace py = pybind11;

// torch's own classes, and the offsets of DTensor's `__slots__` in its objects. Found once, when
// the library is enabled, and held for the life of the process.
struct TorchClasses {
  PyTypeObject* dtensor = nullptr;
  PyTypeObject* dtensor_spec = nullptr;
  Py_ssize_t local_tensor_offset = 0;
  Py_ssize_t spec_offset = 0;
};

// Finds them. Raises RuntimeError where `_local_tensor` and `_spec` are no slots of DTensor.
void find_torch_classes();
const TorchClasses& torch_classes();

// Holds the GIL for a scope, taken where this thread does not have it. Not pybind's, which looks up
// a thread state of its own each time and costs as much again as the GIL.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// The Python object of a tensor, borrowed; null where there is none.
inline PyObject* python_object(const at::Tensor& tensor) {
  return slotted_object(tensor.unsafeGetTensorImpl()->pyobj_slot());
}

// A slot of a DTensor.
inline PyObject*& slot(PyObject* dtensor, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(dtensor) + offset);
}

// `dtensor._spec`, borrowed; null before it is set.
inline PyObject* spec_slot(PyObject* dtensor) {
  return slot(dtensor, torch_classes().spec_offset);
}

// `dtensor._local_tensor`, borrowed; null before it is set.
inline PyObject* local_tensor_slot(PyObject* dtensor) {
  return slot(dtensor, torch_classes().local_tensor_offset);
}

// An exact DTensor: not a subclass, which may mean anything by an operator.
inline bool is_dtensor(PyObject* object) {
  return object != nullptr && Py_TYPE(object) == torch_classes().dtensor;
}

}  // namespace dtensor_rules
