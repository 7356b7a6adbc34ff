#include "dtensor_rules/methods/methods.h"

namespace dtensor_rules {

namespace {

enum class PlacementKind : uint64_t { kReplicate, kShard, kPartial };

struct PlacementClasses {
  PyObject* replicate;
  PyObject* shard;
  PyObject* partial;
  PyObject* dim;        // the attributes' names
  PyObject* reduce_op;
};

const PlacementClasses& placement_classes() {
  // References for the life of the process.
  static const PlacementClasses found = [] {
    const auto types = py::module_::import("torch.distributed.tensor.placement_types");
    const auto reference = [&](const char* name) {
      return py::object(types.attr(name)).release().ptr();
    };
    return PlacementClasses{
        reference("Replicate"), reference("Shard"), reference("Partial"),
        PyUnicode_InternFromString("dim"), PyUnicode_InternFromString("reduce_op")};
  }();
  return found;
}

py::object attribute(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object, name);
  if (value == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(value);
}

void add_kind(Key& key, PlacementKind kind, int64_t number) {
  // In 32 bits: dims, and lengths of names.
  key.add_word(static_cast<uint64_t>(kind) | static_cast<uint64_t>(number) << 32);
}

bool add_placement(Key& key, PyObject* placement) {
  const PlacementClasses& known = placement_classes();
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(placement));
  if (type == known.replicate) {
    add_kind(key, PlacementKind::kReplicate, 0);
    return true;
  }
  if (type == known.shard) {
    const py::object dim = attribute(placement, known.dim);
    if (!PyLong_CheckExact(dim.ptr())) {
      return false;
    }
    add_kind(key, PlacementKind::kShard, PyLong_AsLongLong(dim.ptr()));
    return true;
  }
  if (type != known.partial) {
    return false;
  }
  const auto name = py::cast<std::string>(attribute(placement, known.reduce_op));
  add_kind(key, PlacementKind::kPartial, static_cast<int64_t>(name.size()));
  for (const char letter : name) {
    key.add_word(static_cast<uint64_t>(letter));
  }
  return true;
}

}  // namespace

bool add_placements(Key& key, PyObject* placements) {
  if (!PyList_CheckExact(placements) && !PyTuple_CheckExact(placements)) {
    return false;
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(placements);
  key.add_word(static_cast<uint64_t>(count));
  for (Py_ssize_t index = 0; index < count; ++index) {
    // Held: reading one may run Python, which may change the list.
    const auto placement =
        py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(placements, index));
    if (!add_placement(key, placement.ptr()) ||
        PySequence_Fast_GET_SIZE(placements) != count) {
      return false;
    }
  }
  return true;
}

}  // namespace dtensor_rules
