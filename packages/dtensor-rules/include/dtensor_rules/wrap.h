// DTensors made in C++, as torch's `DTensor(local_tensor, spec, requires_grad=False)` makes them.
#pragma once

#include "dtensor_rules/spec.h"

namespace dtensor_rules {

// A DTensor of this spec around a local tensor, detached from autograd. Give up the local tensor
// (std::move) where possible: torch pays for each holder of a tensor that Python has too.
at::Tensor wrap(at::Tensor local, const Spec& spec);

// One that results from a view: it begins where the local view begins, and shares the storage of
// the base's wrapper if one is given, as torch's return_and_correct_aliasing arranges it.
at::Tensor wrap_view(at::Tensor local, const Spec& spec, const at::Tensor* base);

// One of torch's own dispatch: it begins where the local tensor begins, in a storage of its own, and
// has this very object as its spec.
at::Tensor wrap_alone(at::Tensor local, const Spec& spec, PyObject* spec_object);

}  // namespace dtensor_rules
