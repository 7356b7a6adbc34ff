#include "dtensor_rules/methods/method_graph.h"
#include "dtensor_rules/dispatch/wrap.h"

namespace dtensor_rules {

namespace {

struct Unwrapping {
  at::Tensor local;
  SpecPtr spec;
};

// As torch.distributed.tensor._api._ToTorchTensor, whose gradient is a DTensor with the placements
// of the input, replicated where that is partial.
struct ToLocal : torch::autograd::Function<ToLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor&, const Unwrapping& work) {
    remember(*context, work.spec, work.local);
    return work.local.view_as(work.local);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    return give_back(*context, grads, &distributed_grad);
  }

  static at::Tensor distributed_grad(const at::Tensor& grad, const Saved& saved) {
    constexpr Half kHalf = Half::kToLocalGrad;
    Reason reason = unusual_state();
    if (reason == Reason::kNone && grad.key_set().has(c10::DispatchKey::Python)) {
      reason = Reason::kLocalSubclass;
    }
    if (reason == Reason::kNone && at::GradMode::is_enabled()) {
      reason = Reason::kUnsupported;
    }
    if (reason != Reason::kNone) {
      count_fallback(kHalf, reason);
      return torchs_backward(kHalf, grad, saved, nullptr);
    }
    Key key = key_of(kHalf);
    key.add_word(saved.spec->id);
    // Torch compares them with the gradient's, from 2.14 on.
    for (const int64_t stride : saved.strides) {
      key.add_word(static_cast<uint64_t>(stride));
    }
    add_layout(key, grad);
    const PlanPtr plan = find_plan(kHalf, key);
    if (!plan || plan->reason != Reason::kNone) {
      return torchs_backward(kHalf, grad, saved, plan ? nullptr : &key);
    }
    return wrap(grad.view_as(grad), *plan->outputs[0].spec);
  }
};

// Whether it is an nn.Parameter, which to_local keeps: a mark in the object's dict.
bool is_parameter(PyObject* dtensor) {
  static PyObject* const mark = PyUnicode_InternFromString("_is_param");
  PyObject** dict = _PyObject_GetDictPtr(dtensor);
  return dict != nullptr && *dict != nullptr && PyDict_GetItem(*dict, mark) != nullptr;
}

}  // namespace

py::object to_local(PyObject* dtensor) {
  constexpr Half kHalf = Half::kToLocal;
  Parts parts;
  Reason reason = unusual_state();
  if (reason == Reason::kNone) {
    reason = read_parts(dtensor, parts);
  }
  if (reason == Reason::kNone && is_parameter(dtensor)) {
    reason = Reason::kUnsupported;
  }
  if (reason != Reason::kNone) {
    count_fallback(kHalf, reason);
    return py::none();
  }
  count(half_stats(kHalf).cache);  // nothing has to be learned
  if (!at::GradMode::is_enabled()) {
    return py::reinterpret_borrow<py::object>(local_tensor_slot(dtensor));
  }
  const Unwrapping work{*parts.local, intern_shared(spec_slot(dtensor))};
  return py::cast(ToLocal::apply(*parts.tensor, work));
}

}  // namespace dtensor_rules
