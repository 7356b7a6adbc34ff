#include "dtensor_rules/methods/method_graph.h"

namespace dtensor_rules {

namespace {

constexpr const char* kSaved = "saved";

// Python's backwards, by half.
std::array<py::object, static_cast<size_t>(Half::kCount)>& backwards() {
  static auto* functions = new std::array<py::object, static_cast<size_t>(Half::kCount)>;
  return *functions;  // outlive the interpreter's end
}

}  // namespace

Saved::~Saved() {
  if (Py_IsInitialized() == 0) {
    new SpecPtr(std::move(spec));  // never destroyed: there is no Python left to do it
    return;
  }
  const Gil gil;
  spec.reset();
}

void remember(AutogradContext& context, SpecPtr spec, const at::Tensor& local) {
  context.set_materialize_grads(false);
  context.saved_data[kSaved] =
      c10::IValue::make_capsule(c10::make_intrusive<Saved>(std::move(spec), local));
}

variable_list give_back(AutogradContext& context, const variable_list& grads, Give give) {
  const at::Tensor& grad = grads[0];
  if (!grad.defined()) {
    return {at::Tensor(), at::Tensor()};
  }
  const auto saved = context.saved_data[kSaved].toCapsule();
  const Gil gil;
  return {give(grad, static_cast<const Saved&>(*saved)), at::Tensor()};
}

void set_backward(Half half, py::object function) {
  backwards()[static_cast<size_t>(half)] = std::move(function);
}

at::Tensor torchs_backward(Half half, const at::Tensor& grad, const Saved& saved, const Key* key) {
  const py::object function = backwards()[static_cast<size_t>(half)];
  const py::tuple strides = py::cast(at::IntArrayRef(saved.strides));
  const auto answer =
      py::cast<py::tuple>(function(grad, saved.spec->object, saved.dtype, strides));
  if (key != nullptr && !py::object(answer[1]).is_none()) {
    const auto meaning = py::cast<py::tuple>(answer[1]);
    learn(*key, meaning[0], meaning[1]);
  }
  return py::cast<at::Tensor>(answer[0]);
}

}  // namespace dtensor_rules
