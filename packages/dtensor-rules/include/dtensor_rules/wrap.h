// DTensors made in C++, as torch's `DTensor(local_tensor, spec, requires_grad=False)` makes them.
#pragma once

#include "dtensor_rules/spec.h"

namespace dtensor_rules {

// A DTensor of this spec around a local tensor, detached from autograd. With `base` it is a view:
// it shares that wrapper's storage, as torch's return_and_correct_aliasing arranges it.
at::Tensor wrap(const at::Tensor& local, const Spec& spec, const at::Tensor* base = nullptr);

}  // namespace dtensor_rules
