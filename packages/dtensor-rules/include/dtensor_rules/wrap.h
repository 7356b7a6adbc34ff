// DTensors made in C++, as torch's `DTensor(local_tensor, spec, requires_grad=False)` makes them.
#pragma once

#include "dtensor_rules/spec.h"

namespace dtensor_rules {

// What a view is a view of, and where in it (in elements, from where the base itself begins).
struct ViewOf {
  const at::Tensor& base;
  int64_t offset;
};

// A DTensor of this spec around a local tensor, detached from autograd. A view shares the storage
// of its base's wrapper, as torch's return_and_correct_aliasing arranges it.
at::Tensor wrap(
    const at::Tensor& local, const Spec& spec, const std::optional<ViewOf>& view = std::nullopt);

}  // namespace dtensor_rules
