// Kernels for operators whose signatures are known when this is compiled: the way from the caller to
// the local operator without the dispatcher's stack, on which every argument is boxed.
//
// A typed kernel runs calls whose plan is in the cache. All else goes the general way (dispatch.h).
// It is registered at two dispatch keys. At `Python`, where autograd has done its part. And at
// `PythonTLSSnapshot`, which every call of a DTensor meets first: where autograd will have no part,
// as in backward, under no_grad and in optimizers, it runs the call at once.
#pragma once

#include <ATen/core/PythonFallbackKernel.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <tuple>

#include "dtensor_rules/plans/cache.h"
#include "dtensor_rules/dispatch/dispatch.h"
#include "dtensor_rules/dispatch/execute.h"
#include "dtensor_rules/dispatch/explicit_only.h"
#include "dtensor_rules/dispatch/local.h"
#include "dtensor_rules/dispatch/read.h"
#include "dtensor_rules/dispatch/watch.h"

namespace dtensor_rules {

struct TypedKernels {
  c10::KernelFunction at_python;
  c10::KernelFunction at_snapshot;
};

// The typed kernels of an operator, if it is one of typed_operators.cpp's.
std::optional<TypedKernels> typed_kernels(Operator& op);

// Whether the keys of a call between PythonTLSSnapshot and Python are autograd's only, and grad mode
// is off: autocast, functorch, tracing and conjugation bits all have keys of their own.
inline bool only_autograd_before_python(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  using c10::DispatchKeySet;
  static constexpr DispatchKeySet kOrdinary = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      DispatchKeySet({DispatchKey::PythonTLSSnapshot, DispatchKey::Python, DispatchKey::Dense}) |
      DispatchKeySet(DispatchKeySet::RAW, c10::full_backend_mask);
  return !c10::GradMode::is_enabled() && (keys.raw_repr() & ~kOrdinary.raw_repr()) == 0;
}

// Forward-mode differentiation goes on under no_grad, so autograd has work where there is a tangent.
// (Torch 2.13 refuses to give a DTensor one: test_fallthrough.py has the canary.)
inline bool has_tangent(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->fw_grad_ != nullptr;
}
inline bool has_tangent(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && has_tangent(*tensor);
}
inline bool has_tangent(const at::ITensorListRef& tensors) {
  return std::any_of(
      tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return has_tangent(tensor); });
}
inline bool has_tangent(const at::TensorList& tensors) {
  return has_tangent(at::ITensorListRef(tensors));
}
template <class T>
bool has_tangent(const T&) {
  return false;
}

// By signature, and not by operator: many have the same, and each costs the compiler a second.
template <class Signature>
class Typed;

template <class Result, class... Args>
class Typed<Result(Args...)> {
 public:
  using Function = Result(Args...);
  using Redispatch = Result(c10::DispatchKeySet, Args...);

  class AtPython final : public c10::OperatorKernel {
   public:
    AtPython(Operator* op, Function* call) : op_(op), call_(call) {}

    Result operator()(c10::DispatchKeySet, Args... args) {
      const c10::impl::ExcludeDispatchKeyGuard below(kBeforePython);
      if (auto result = hit(*op_, call_, kAll, args...)) {
        return returned(std::move(*result), args...);
      }
      auto stack = c10::impl::boxArgs<Args...>(std::forward<Args>(args)...);
      dispatch(*op_, stack);
      if constexpr (kReturnsNothingNew) {
        return returned({}, args...);
      } else {
        return c10::impl::PopResult<Result>::call(stack);
      }
    }

   private:
    Operator* op_;
    Function* call_;
  };

  class AtSnapshot final : public c10::OperatorKernel {
   public:
    AtSnapshot(Operator* op, Function* call, Redispatch* redispatch)
        : op_(op), call_(call), redispatch_(redispatch) {}

    Result operator()(c10::DispatchKeySet keys, Args... args) {
      // Views are recorded without gradients too (ADInplaceOrView).
      if (!op_->is_view && only_autograd_before_python(keys) && !(has_tangent(args) || ...)) {
        const c10::impl::ExcludeDispatchKeyGuard below(kBeforePython);
        if (auto result = hit(*op_, call_, kAll, args...)) {
          if constexpr (std::is_reference_v<Result>) {
            first(args...).unsafeGetTensorImpl()->bump_version();  // as ADInplaceOrView does
          }
          return returned(std::move(*result), args...);
        }
      }
      // Autograd saves tensors, and torch takes the GIL for each: once for all is cheaper. The locks
      // that autograd takes meanwhile (AutogradMeta::mutex_) torch's getters take with the GIL too.
      const Gil gil;
      // What torch's own fallback at this key does, but for the boxing.
      const at::impl::MaybeSetTLSOnEntryGuard guard;
      return redispatch_(
          keys & c10::DispatchKeySet(
                     c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::PythonTLSSnapshot),
          std::forward<Args>(args)...);
    }

   private:
    Operator* op_;
    Function* call_;
    Redispatch* redispatch_;
  };

 private:
  // An in-place operator returns its first argument, or nothing where that is a list.
  static constexpr bool kReturnsNothingNew = std::is_reference_v<Result> || std::is_void_v<Result>;
  struct Nothing {};
  using LocalResult = std::conditional_t<kReturnsNothingNew, Nothing, Result>;
  static constexpr std::index_sequence_for<Args...> kAll{};

  static Result returned(LocalResult local_result, Args&... args) {
    if constexpr (std::is_reference_v<Result>) {
      return first(args...);
    } else if constexpr (!std::is_void_v<Result>) {
      return local_result;
    }
  }

  template <class First, class... Rest>
  static First& first(First& tensor, Rest&...) {
    return tensor;
  }

  // Runs the call by its plan; nothing where there is none, or none for a typed kernel.
  template <size_t... index>
  static std::optional<LocalResult> hit(
      Operator& op, Function* call_local, std::index_sequence<index...>,
      const std::decay_t<Args>&... args) {
    if (!gate_is_open()) {
      return {};
    }
    const Gil gil;
    check_watched();
    Call call(op);
    const bool readable =
        ((read(args, {index, op.by_value[index]}, call) == Reason::kNone) && ...);
    if (!readable || call.dtensors.empty()) {
      return {};
    }
    const PlanPtr plan = plans().find(call.key);
    if (!plan || !plan->is_direct() || !may_run(*plan)) {
      return {};
    }
    count_run(op, *plan, /*missed=*/false);
    count(op.stats.typed);
    Walk walk(call, *plan);
    std::tuple<Local<std::decay_t<Args>>...> locals;
    (std::get<index>(locals).set(args, index, walk), ...);
    if constexpr (kReturnsNothingNew) {
      call_local(std::get<index>(locals).get()...);
      return Nothing{};
    } else {
      return finished(
          *plan, base_of(op, args...), call_local(std::get<index>(locals).get()...));
    }
  }

  template <class First, class... Rest>
  static const at::Tensor* base_of(const Operator& op, const First& argument, const Rest&...) {
    if constexpr (std::is_same_v<First, at::Tensor>) {
      return op.is_view ? &argument : nullptr;
    } else {
      return nullptr;
    }
  }

  static at::Tensor finished(Plan& plan, const at::Tensor* base, at::Tensor local) {
    return wrapped(plan.outputs[0], std::move(local), base);
  }

  static bool finished(Plan& plan, const at::Tensor*, bool local) {
    return plan.finish ? plan.finish->apply(local).toBool() : local;
  }

  static std::vector<at::Tensor> finished(
      Plan& plan, const at::Tensor*, std::vector<at::Tensor> locals) {
    return wrapped(plan.outputs[0], std::move(locals));
  }

  template <class... Tensors>
  static std::tuple<Tensors...> finished(
      Plan& plan, const at::Tensor*, std::tuple<Tensors...> locals) {
    auto output = plan.outputs.begin();
    std::apply(
        [&](auto&... local) { ((local = wrapped(*output++, std::move(local), nullptr)), ...); },
        locals);
    return locals;
  }
};

}  // namespace dtensor_rules
