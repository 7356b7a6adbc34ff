#include "dtensor_rules/python.h"

#include <structmember.h>

#include <stdexcept>

namespace dtensor_rules {

namespace {

TorchClasses found;

Py_ssize_t slot_offset(const py::object& cls, const char* name) {
  const py::object descriptor = cls.attr("__dict__")[name];
  if (!Py_IS_TYPE(descriptor.ptr(), &PyMemberDescr_Type)) {
    throw std::runtime_error(
        std::string("dtensor_rules: DTensor.") + name +
        " is no slot in this torch; use a torch that dtensor-rules supports");
  }
  return reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset;
}

}  // namespace

void find_torch_classes() {
  const py::object dtensor = py::module_::import("torch.distributed.tensor").attr("DTensor");
  const py::object spec =
      py::module_::import("torch.distributed.tensor._dtensor_spec").attr("DTensorSpec");
  TorchClasses classes;
  classes.local_tensor_offset = slot_offset(dtensor, "_local_tensor");
  classes.spec_offset = slot_offset(dtensor, "_spec");
  // Held for ever: kernels may run until the process ends.
  classes.dtensor = reinterpret_cast<PyTypeObject*>(py::object(dtensor).release().ptr());
  classes.dtensor_spec = reinterpret_cast<PyTypeObject*>(py::object(spec).release().ptr());
  found = classes;
}

const TorchClasses& torch_classes() {
  return found;
}

}  // namespace dtensor_rules
