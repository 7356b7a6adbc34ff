#include "dtensor_rules/dispatch/explicit_only.h"
#include "dtensor_rules/methods/method_graph.h"
#include "dtensor_rules/dispatch/wrap.h"

namespace dtensor_rules {

namespace {

at::Tensor wrap_view(const at::Tensor& local, const Spec& spec) {
  // A tensor of its own, as torch makes it: autograd's marks on one are not on the other.
  return wrap(local.view_as(local), spec);
}

// As torch.distributed.tensor._api._FromTorchTensor, whose gradient is local again, with the
// placements of the result, replicated where that is partial.
struct FromLocal : torch::autograd::Function<FromLocal> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, const PlanPtr& plan) {
    const SpecPtr& spec = plan->outputs[0].spec;
    remember(*context, spec, local);
    return wrap_view(local, *spec);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    return give_back(*context, grads, &local_grad);
  }

  static at::Tensor local_grad(const at::Tensor& grad, const Saved& saved) {
    constexpr Half kHalf = Half::kFromLocalGrad;
    Parts parts;
    Reason reason = unusual_state();
    if (reason == Reason::kNone) {
      reason = read_parts(grad, parts);
    }
    if (reason == Reason::kNone && at::GradMode::is_enabled()) {
      reason = Reason::kUnsupported;
    }
    if (reason != Reason::kNone) {
      count_fallback(kHalf, reason);
      return torchs_backward(kHalf, grad, saved, nullptr);
    }
    Key key = key_of(kHalf);
    key.add_word(parts.spec->id);
    key.add_word(saved.spec->id);
    const PlanPtr plan = find_plan(kHalf, key);
    if (!plan || plan->reason != Reason::kNone) {
      return torchs_backward(kHalf, grad, saved, plan ? nullptr : &key);
    }
    // From 2.14 on torch shows the context what this moves, and may be told to refuse it.
    if (!may_run(*plan)) {
      count_fallback(kHalf, Reason::kExplicitOnly);
      return torchs_backward(kHalf, grad, saved, nullptr);
    }
    const at::Tensor local = *parts.local;  // a copy: others may run while it is sent
    return plan->moves.empty() ? local : transformed(*plan->moves[0].transform, local);
  }
};

// A shape or strides that were given; false where they are no tuple of plain ints.
bool add_given(Key& key, PyObject* numbers) {
  if (numbers == Py_None) {
    key.add(Tag::kNone);
    return true;
  }
  if (!PyTuple_Check(numbers)) {
    return false;
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(numbers);
  key.add(Tag::kList, static_cast<uint64_t>(count));
  for (Py_ssize_t index = 0; index < count; ++index) {
    PyObject* number = PyTuple_GET_ITEM(numbers, index);
    if (!PyLong_CheckExact(number)) {
      return false;
    }
    key.add_word(static_cast<uint64_t>(PyLong_AsLongLong(number)));
  }
  return true;
}

// The key of a call, or why it is torch's. The mesh is known by its address: plans hold their mesh.
Reason read_from_local(
    PyObject* local, PyObject* mesh, PyObject* placements, PyObject* shape, PyObject* stride,
    Key& key) {
  if (const Reason reason = unusual_state(); reason != Reason::kNone) {
    return reason;
  }
  if (mesh == Py_None || !THPVariable_Check(local)) {
    return Reason::kUnsupported;
  }
  const at::Tensor& tensor = THPVariable_Unpack(local);
  if (tensor.key_set().has(c10::DispatchKey::Python)) {
    return Reason::kLocalSubclass;
  }
  key.add_word(reinterpret_cast<uint64_t>(mesh));
  add_layout(key, tensor);
  const bool plain =
      add_placements(key, placements) && add_given(key, shape) && add_given(key, stride);
  return plain ? Reason::kNone : Reason::kUnsupported;
}

}  // namespace

py::object from_local(
    PyObject* local, PyObject* mesh, PyObject* placements, PyObject* shape, PyObject* stride) {
  constexpr Half kHalf = Half::kFromLocal;
  Key key = key_of(kHalf);
  const Reason reason = read_from_local(local, mesh, placements, shape, stride, key);
  if (reason != Reason::kNone) {
    count_fallback(kHalf, reason);
    return py::none();
  }
  const PlanPtr plan = find_plan(kHalf, key);
  if (!plan) {
    return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  }
  if (plan->reason != Reason::kNone) {
    return py::none();
  }
  const at::Tensor& tensor = THPVariable_Unpack(local);
  if (at::GradMode::is_enabled() && tensor.requires_grad()) {
    return py::cast(FromLocal::apply(tensor, plan));
  }
  const at::NoGradGuard no_grad;
  return py::cast(wrap_view(tensor, *plan->outputs[0].spec));
}

void learn_from_local(
    PyObject* local, PyObject* mesh, PyObject* placements, PyObject* shape, PyObject* stride,
    const py::object& spec) {
  Key key = key_of(Half::kFromLocal);
  if (read_from_local(local, mesh, placements, shape, stride, key) == Reason::kNone) {
    // Its own object: the mesh that the user gave is the mesh of the result.
    learn(key, spec, py::none(), /*own=*/true);
  }
}

}  // namespace dtensor_rules
