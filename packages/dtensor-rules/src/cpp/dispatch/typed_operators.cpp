// The operators with typed kernels: those that steps of LLaMA, Mixtral and DiT spend their time in.
#include <ATen/Operators.h>

#include <unordered_map>

#include "dtensor_rules/dispatch/typed.h"

namespace dtensor_rules {

namespace {

using Make = TypedKernels (*)(Operator&);
using Makers = std::unordered_map<std::string, Make>;

template <class Op>
TypedKernels make(Operator& op) {
  using AtPython = typename Typed<typename Op::schema>::AtPython;
  using AtSnapshot = typename Typed<typename Op::schema>::AtSnapshot;
  return {
      c10::KernelFunction::makeFromUnboxedFunctor<false, AtPython>(
          std::make_unique<AtPython>(&op, &Op::call)),
      c10::KernelFunction::makeFromUnboxedFunctor<false, AtSnapshot>(
          std::make_unique<AtSnapshot>(&op, &Op::call, &Op::redispatch))};
}

template <class... Ops>
Makers makers_of() {
  return {{std::string(Ops::name) + "." + Ops::overload_name, &make<Ops>}...};
}

namespace ops = at::_ops;

const Makers& makers() {
  static const auto* instance = new Makers(makers_of<
      // elementwise
      ops::add_Tensor, ops::add__Tensor, ops::sub_Tensor, ops::sub__Tensor, ops::mul_Tensor,
      ops::mul__Tensor, ops::mul_Scalar, ops::div_Tensor, ops::div__Tensor, ops::div_Scalar,
      ops::neg,
      ops::pow_Tensor_Scalar, ops::rsqrt, ops::sqrt, ops::exp, ops::sin, ops::cos, ops::tanh,
      ops::tanh_backward, ops::sigmoid, ops::sigmoid_backward, ops::relu,
      ops::threshold_backward, ops::silu, ops::silu_backward, ops::gelu, ops::gelu_backward,
      ops::where_self, ops::masked_fill_Scalar, ops::eq_Tensor, ops::equal,
      // matrices
      ops::mm, ops::bmm, ops::addmm,
      // views
      ops::view, ops::_unsafe_view, ops::t, ops::transpose_int, ops::permute, ops::expand,
      ops::unsqueeze, ops::slice_Tensor, ops::select_int, ops::split_Tensor,
      ops::detach, ops::alias,
      // copies
      ops::clone, ops::_to_copy, ops::copy_, ops::cat, ops::stack, ops::zeros_like,
      ops::ones_like, ops::slice_backward, ops::fill__Scalar, ops::zero_,
      // reductions and normalisation
      ops::sum, ops::sum_dim_IntList, ops::mean, ops::mean_dim, ops::_softmax,
      ops::_softmax_backward_data, ops::native_layer_norm, ops::embedding,
      ops::embedding_dense_backward,
      // optimizers and clipping
      ops::addcdiv_, ops::addcmul_, ops::lerp__Scalar, ops::clamp, ops::reciprocal,
      ops::linalg_vector_norm, ops::_foreach_norm_Scalar, ops::_foreach_add__List,
      ops::_foreach_add__Scalar, ops::_foreach_mul__Scalar, ops::_foreach_mul__Tensor,
      ops::_foreach_lerp__Scalar, ops::_foreach_addcdiv__ScalarList, ops::_foreach_addcmul__Scalar,
      ops::_foreach_div__ScalarList, ops::_foreach_sqrt, ops::_fused_adamw_, ops::_fused_adam_>());
  return *instance;
}

}  // namespace

std::optional<TypedKernels> typed_kernels(Operator& op) {
  const auto& name = op.handle.operator_name();
  const auto known = makers().find(name.name + "." + name.overload_name);
  if (known == makers().end()) {
    return {};
  }
  return known->second(op);
}

}  // namespace dtensor_rules
