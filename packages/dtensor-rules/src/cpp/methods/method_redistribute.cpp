#include "dtensor_rules/methods/method_graph.h"
#include "dtensor_rules/dispatch/wrap.h"

namespace dtensor_rules {

namespace {

at::Tensor carry_out(const Plan& plan, const at::Tensor& local) {
  const SpecPtr& spec = plan.outputs[0].spec;
  return plan.moves.empty() ? wrap(local, *spec)
                            : wrap(transformed(*plan.moves[0].transform, local), *spec);
}

struct Redistributing {
  PlanPtr plan;
  at::Tensor local;
  SpecPtr source;
};

// As torch.distributed.tensor._redistribute.Redistribute, which sends the gradient back to the
// placements that the input had, replicated where the input was partial and it is not.
struct Redistribute : torch::autograd::Function<Redistribute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor&, const Redistributing& work) {
    remember(*context, work.source, work.local);
    return carry_out(*work.plan, work.local);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    return give_back(*context, grads, &send_back);
  }

  static at::Tensor send_back(const at::Tensor& grad, const Saved& saved) {
    constexpr Half kHalf = Half::kRedistributeGrad;
    Parts parts;
    Reason reason = unusual_state();
    if (reason == Reason::kNone) {
      reason = read_parts(grad, parts);
    }
    if (reason == Reason::kNone &&
        (at::GradMode::is_enabled() || parts.local->scalar_type() != saved.dtype)) {
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
    return carry_out(*plan, at::Tensor(*parts.local));
  }
};

// The key of a call, or why it is torch's.
Reason read_redistribute(PyObject* dtensor, PyObject* placements, Parts& parts, Key& key) {
  if (const Reason reason = unusual_state(); reason != Reason::kNone) {
    return reason;
  }
  if (const Reason reason = read_parts(dtensor, parts); reason != Reason::kNone) {
    return reason;
  }
  key.add_word(parts.spec->id);
  return add_placements(key, placements) ? Reason::kNone : Reason::kUnsupported;
}

bool is_its_mesh(PyObject* dtensor, PyObject* mesh) {
  return mesh == Py_None || py::object(py::handle(spec_slot(dtensor)).attr("mesh")).ptr() == mesh;
}

}  // namespace

py::object redistribute(PyObject* dtensor, PyObject* mesh, PyObject* placements) {
  constexpr Half kHalf = Half::kRedistribute;
  Parts parts;
  Key key = key_of(kHalf);
  Reason reason = read_redistribute(dtensor, placements, parts, key);
  if (reason == Reason::kNone && !is_its_mesh(dtensor, mesh)) {
    reason = Reason::kUnsupported;
  }
  if (reason != Reason::kNone) {
    count_fallback(kHalf, reason);
    return py::none();
  }
  PlanPtr plan = find_plan(kHalf, key);
  if (!plan) {
    return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  }
  if (plan->reason != Reason::kNone) {
    return py::none();
  }
  if (at::GradMode::is_enabled() && parts.tensor->requires_grad()) {
    const Redistributing work{std::move(plan), *parts.local, intern_shared(spec_slot(dtensor))};
    return py::cast(Redistribute::apply(*parts.tensor, work));
  }
  const at::NoGradGuard no_grad;  // as torch's autograd function runs its forward
  // A copy: others may run while it is sent, and give the DTensor another local tensor.
  return py::cast(carry_out(*plan, at::Tensor(*parts.local)));
}

void learn_redistribute(
    PyObject* dtensor, PyObject* placements, const py::object& spec, const py::object& transform) {
  Parts parts;
  Key key = key_of(Half::kRedistribute);
  if (read_redistribute(dtensor, placements, parts, key) == Reason::kNone) {
    learn(key, spec, transform);
  }
}

}  // namespace dtensor_rules
