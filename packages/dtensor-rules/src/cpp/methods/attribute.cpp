#include "dtensor_rules/methods/attribute.h"

#include <cstring>

namespace dtensor_rules {

namespace {

// Torch's argument parser asks by name, through the type's `tp_getattr`, which nothing else in
// Python reads where `tp_getattro` is set as well. Without one it makes a str of the name each time
// and looks it up along the MRO, for no cache knows a new str: most of what parsing a DTensor costs.
constexpr const char* kName = "__torch_function__";

struct Answer {
  PyObject* value = nullptr;  // owned
  unsigned int version = 0;   // of the class when it was asked; 0 is no version
};

Answer& answer() {
  static Answer instance;
  return instance;
}

// An attribute of that name on the object itself, which torch would find too, is not looked for:
// `__torch_function__` is a class method by its definition (NEP 18, torch.overrides).
PyObject* get_attribute(PyObject* object, char* name) {
  PyTypeObject* type = Py_TYPE(object);
  Answer& known = answer();
  const bool asked = type == torch_classes().dtensor && std::strcmp(name, kName) == 0;
  if (asked && known.version != 0 && known.version == type->tp_version_tag) [[likely]] {
    return Py_NewRef(known.value);
  }
  PyObject* text = PyUnicode_InternFromString(name);
  if (text == nullptr) {
    return nullptr;
  }
  PyObject* value = type->tp_getattro(object, text);
  Py_DECREF(text);
  // Functions of Python would be bound to this object, and are not kept.
  if (asked && value != nullptr && PyCFunction_CheckExact(value)) {
    Py_XDECREF(std::exchange(known.value, Py_NewRef(value)));
    known.version = type->tp_version_tag;
  }
  return value;
}

}  // namespace

void set_attribute_answered(bool answered) {
  if (PyTypeObject* dtensor = torch_classes().dtensor; dtensor != nullptr) {
    dtensor->tp_getattr = answered ? &get_attribute : nullptr;
  }
}

}  // namespace dtensor_rules
