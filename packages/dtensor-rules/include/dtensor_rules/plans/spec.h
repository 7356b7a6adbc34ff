// Interned specs: one `Spec` for all DTensorSpecs that are equal, so that a key holds a number.
//
// A DTensorSpec is known by its address first, and by its value (Python's hash and ==) when the
// address is new. The table keeps every spec whose address it knows alive, so an address is never
// taken over by another object, and forgets the addresses again when there are too many. A spec
// that is mutated is forgotten at once (hooks.py).
#pragma once

#include <cstdint>
#include <memory>

#include "dtensor_rules/python.h"

namespace dtensor_rules {

struct Spec {
  uint64_t id = 0;  // never used twice, so a key never means another spec
  py::object object;  // DTensorSpec
  // Global shape and strides of the tensor, and what a wrapper of it needs.
  c10::SmallVector<int64_t, 4> sizes;
  c10::SmallVector<int64_t, 4> strides;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  size_t nbytes = 0;  // of the wrapper's storage, which holds no data
  // Whether calls with it may be cached at all; if not, they are left to torch.
  bool participates = true;  // this rank is part of the mesh
  bool symbolic = false;     // a size is a SymInt, or tensor_meta is missing
};

using SpecPtr = std::shared_ptr<const Spec>;

// The interned spec of a DTensorSpec. Needs the GIL; may run Python for an address it sees first.
const Spec& intern(PyObject* spec);
SpecPtr intern_shared(PyObject* spec);

// Forgets this address, and the value and all of its addresses where it is the object that stands
// for it: the object is about to be changed. False if it was not known.
bool forget_spec(PyObject* spec);
// Forgets all; ids go on counting.
void clear_specs();
// How many addresses are known, and how many different specs, some of which nobody may hold.
size_t known_addresses();
size_t known_specs();

}  // namespace dtensor_rules
