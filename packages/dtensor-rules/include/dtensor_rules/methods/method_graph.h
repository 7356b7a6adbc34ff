// What DTensor's methods leave in the autograd graph, and their way back through it.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "dtensor_rules/methods/methods.h"

namespace dtensor_rules {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What a backward has to know, for as long as the graph lives; its end takes the GIL.
struct Saved final : torch::CustomClassHolder {
  Saved(SpecPtr of, const at::Tensor& local)
      : spec(std::move(of)),
        dtype(local.scalar_type()),
        strides(local.strides().begin(), local.strides().end()) {}
  ~Saved() override;
  SpecPtr spec;  // of the forward's DTensor: its input, or from_local's result
  // Of its local tensor.
  c10::ScalarType dtype;
  c10::SmallVector<int64_t, 4> strides;
};

// Has a forward remember that, and lets undefined gradients pass as they are.
void remember(AutogradContext& context, SpecPtr spec, const at::Tensor& local);

// A backward of one gradient; `give` gets it with the GIL.
using Give = at::Tensor (*)(const at::Tensor& grad, const Saved& saved);
variable_list give_back(AutogradContext& context, const variable_list& grads, Give give);

// Has torch do a backward (set_backward). `key`: to be learned from it; null where the call is not
// plain.
at::Tensor torchs_backward(Half half, const at::Tensor& grad, const Saved& saved, const Key* key);

}  // namespace dtensor_rules
