// DTensors made in C++, as torch's `DTensor(local_tensor, spec, requires_grad=False)` makes them.
#pragma once

#include "dtensor_rules/plans/spec.h"

namespace dtensor_rules {

// A DTensor of this spec around a local tensor, detached from autograd: it begins where the local
// tensor begins, in a storage of its own. Give up the local tensor (std::move) where possible: torch
// pays for each holder of a tensor that Python has too.
at::Tensor wrap(at::Tensor local, const Spec& spec);
// One with this very object as its spec.
at::Tensor wrap(at::Tensor local, const Spec& spec, PyObject* spec_object);

// One that results from a view: it shares the storage of the base's wrapper, as torch's
// return_and_correct_aliasing arranges it.
at::Tensor wrap_view(at::Tensor local, const Spec& spec, const at::Tensor& base);

}  // namespace dtensor_rules
