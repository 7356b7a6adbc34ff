// DTensor's own methods without Python: redistribute, from_local and to_local, for the plain case.
//
// Note: each method has two halves, forward and backward, and each half is looked up by a key like
// an operator's call. What a key means is learned from torch: the first call with it is torch's,
// and the placements of its result are remembered (methods.py). A method is *plain* when torch
// would do nothing but redistribute and wrap: no modes, no functorch, no subclass of either tensor,
// no second derivative. What is not plain is torch's.
#pragma once

#include <array>

#include "dtensor_rules/plans/cache.h"
#include "dtensor_rules/plans/stats.h"

namespace dtensor_rules {

enum class Half : uint8_t {
  kRedistribute,
  kRedistributeGrad,
  kFromLocal,
  kFromLocalGrad,
  kToLocal,
  kToLocalGrad,
  kCount,
};

const char* half_name(Half half);
OpStats& half_stats(Half half);
// Counts, and tells once, that a call is torch's.
void count_fallback(Half half, Reason reason);

// The beginning of a key of this half.
Key key_of(Half half);

// Whether the library is on: graphs outlive it, and are torch's to walk back once it is off.
void set_methods_on(bool on);

// Why no method is plain in this thread now; none where one may be.
Reason unusual_state();

// A DTensor's parts, borrowed from it.
struct Parts {
  const at::Tensor* tensor = nullptr;
  const at::Tensor* local = nullptr;
  const Spec* spec = nullptr;
};
// Reads them; other than none, why the DTensor is not plain.
Reason read_parts(PyObject* object, Parts& parts);
Reason read_parts(const at::Tensor& tensor, Parts& parts);

// Adds a list or tuple of placements; false where one is not exactly Replicate, Shard or Partial.
bool add_placements(Key& key, PyObject* placements);
// Adds what decides the spec of a DTensor around this local tensor.
void add_layout(Key& key, const at::Tensor& local);

// The plan of a key, counted: one with a reason is torch's, and null has to be learned.
PlanPtr find_plan(Half half, const Key& key);
// Remembers what a key means. None as spec: it is torch's. None as transform: the local tensor
// stays. `own`: the spec is handed out as the object that it is, not as one that equals it.
void learn(const Key& key, const py::object& spec, const py::object& transform, bool own = false);

// Python's halves: functions of (gradient, saved spec, dtype, strides) that return the result, and
// what a key is to mean from then on, or None: (spec or None, transform or None). See methods.py.
void set_backward(Half half, py::object function);

// The methods. What they return is a new reference: the result, None where the call is torch's, or
// NotImplemented where it is torch's and then to be learned. They throw what torch throws.
py::object redistribute(PyObject* dtensor, PyObject* mesh, PyObject* placements);
py::object from_local(
    PyObject* local, PyObject* mesh, PyObject* placements, PyObject* shape, PyObject* stride);
py::object to_local(PyObject* dtensor);

// What torch's first call with the same arguments resulted in.
void learn_redistribute(
    PyObject* dtensor, PyObject* placements, const py::object& spec, const py::object& transform);
void learn_from_local(
    PyObject* local, PyObject* mesh, PyObject* placements, PyObject* shape, PyObject* stride,
    const py::object& spec);

}  // namespace dtensor_rules
