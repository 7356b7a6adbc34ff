#include "dtensor_rules/plans/spec.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/flat_hash_map.h>

#include <unordered_map>
#include <vector>

namespace dtensor_rules {

namespace {

// More addresses than this are forgotten together. Steady programs know as many as they have
// parameters and distinct results; only a program that keeps making specs gets here.
constexpr size_t kMostAddresses = 1 << 15;

struct ByAddress {
  PyObject* object = nullptr;  // owned, so that the address stays its own
  SpecPtr spec;
};

struct Table {
  ska::flat_hash_map<PyObject*, ByAddress> by_address;
  std::unordered_map<Py_hash_t, std::vector<std::weak_ptr<const Spec>>> by_value;
  size_t values = 0;  // entries of by_value
  size_t values_after_sweep = 0;
  uint64_t next_id = 1;
};

Table& table() {
  static auto* instance = new Table;  // outlives the interpreter's end
  return *instance;
}

// False, with nothing written, where an item is no plain int.
bool read_ints(const py::handle& sequence, c10::SmallVector<int64_t, 4>& into) {
  for (const auto item : sequence) {
    if (!PyLong_CheckExact(item.ptr())) {
      return false;
    }
    into.push_back(PyLong_AsLongLong(item.ptr()));
  }
  return true;
}

std::shared_ptr<Spec> read(const py::object& object) {
  auto spec = std::make_shared<Spec>();
  spec->object = object;
  const py::object mesh = object.attr("mesh");
  spec->participates = !mesh.attr("get_coordinate")().is_none();
  const py::object meta = object.attr("tensor_meta");
  if (meta.is_none() || !read_ints(meta.attr("shape"), spec->sizes) ||
      !read_ints(meta.attr("stride"), spec->strides)) {
    spec->symbolic = true;
    return spec;
  }
  spec->dtype = py::cast<c10::ScalarType>(meta.attr("dtype"));
  spec->nbytes = at::detail::computeStorageNbytes(
      spec->sizes, spec->strides, c10::elementSize(spec->dtype), 0);
  return spec;
}

py::object strided_flag(const py::object& spec) {
  return spec.attr("use_strided_shard_as_shard_order");
}

// One mesh object, or two of the same ranks over the same process groups. Torch's == does not see
// groups, nor where in the mesh this rank is: both change when a process joins another world.
bool same_mesh(const py::object& known, const py::object& mesh) {
  if (known.is(mesh)) {
    return true;
  }
  const auto groups = [](const py::object& of) {
    return py::getattr(of, "_dim_group_names", py::none());
  };
  return groups(known).equal(groups(mesh)) &&
      known.attr("get_coordinate")().equal(mesh.attr("get_coordinate")());
}

// Equal values: Python's ==, and the flag that decides how _StridedShard is read, which == omits.
bool same(const Spec& known, const py::object& object) {
  return Py_TYPE(known.object.ptr()) == Py_TYPE(object.ptr()) && known.object.equal(object) &&
      strided_flag(known.object).equal(strided_flag(object)) &&
      same_mesh(known.object.attr("mesh"), object.attr("mesh"));
}

// Drops the values that nobody holds any more, each time their number has doubled.
void sweep(Table& all) {
  if (all.values < 2 * all.values_after_sweep + 1024) {
    return;
  }
  all.values = 0;
  for (auto entry = all.by_value.begin(); entry != all.by_value.end();) {
    std::erase_if(entry->second, [](const auto& spec) { return spec.expired(); });
    all.values += entry->second.size();
    entry = entry->second.empty() ? all.by_value.erase(entry) : std::next(entry);
  }
  all.values_after_sweep = all.values;
}

SpecPtr find_or_read(Table& all, const py::object& object) {
  const Py_hash_t hash = py::hash(object);
  // Python's == runs code that may come back here, so the candidates are copied first.
  const std::vector<std::weak_ptr<const Spec>> candidates = all.by_value[hash];
  for (const auto& candidate : candidates) {
    if (SpecPtr known = candidate.lock(); known && same(*known, object)) {
      return known;
    }
  }
  auto fresh = read(object);
  fresh->id = all.next_id++;
  all.by_value[hash].push_back(fresh);
  ++all.values;
  sweep(all);
  return fresh;
}

void drop_addresses(Table& all) {
  // A destructor may run Python, which may come back here: the table is emptied first.
  auto dropped = std::move(all.by_address);
  all.by_address = {};
  for (auto& [address, entry] : dropped) {
    Py_DECREF(entry.object);
  }
}

}  // namespace

SpecPtr intern_shared(PyObject* object) {
  Table& all = table();
  if (const auto known = all.by_address.find(object); known != all.by_address.end()) {
    return known->second.spec;
  }
  SpecPtr spec = find_or_read(all, py::reinterpret_borrow<py::object>(object));
  if (all.by_address.size() >= kMostAddresses) {
    drop_addresses(all);
  }
  if (all.by_address.emplace(object, ByAddress{object, spec}).second) {
    Py_INCREF(object);
  }
  return spec;
}

const Spec& intern(PyObject* object) {
  Table& all = table();
  if (const auto known = all.by_address.find(object); known != all.by_address.end()) [[likely]] {
    return *known->second.spec;
  }
  return *intern_shared(object);
}

bool forget_spec(PyObject* object) {
  Table& all = table();
  const auto known = all.by_address.find(object);
  if (known == all.by_address.end()) {
    return false;
  }
  const SpecPtr spec = known->second.spec;
  std::vector<PyObject*> forgotten = {object};
  all.by_address.erase(known);
  // The canonical object of a value must not change under those who hold the value: neither the
  // value nor the other addresses that stand for it lead to it any more.
  if (spec->object.ptr() == object) {
    for (auto& [hash, specs] : all.by_value) {
      all.values -= std::erase_if(specs, [&](const auto& weak) { return weak.lock() == spec; });
    }
    for (auto other = all.by_address.begin(); other != all.by_address.end();) {
      if (other->second.spec == spec) {
        forgotten.push_back(other->second.object);
        other = all.by_address.erase(other);
      } else {
        ++other;
      }
    }
  }
  for (PyObject* one : forgotten) {
    Py_DECREF(one);
  }
  return true;
}

void clear_specs() {
  Table& all = table();
  drop_addresses(all);
  all.by_value.clear();
  all.values = all.values_after_sweep = 0;
}

size_t known_addresses() {
  return table().by_address.size();
}

size_t known_specs() {
  return table().values;
}

}  // namespace dtensor_rules
