#include "dtensor_rules/methods/methods.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "dtensor_rules/redistribute/redistribute.h"

namespace dtensor_rules {

namespace {

constexpr size_t kHalves = static_cast<size_t>(Half::kCount);
constexpr std::array<const char*, kHalves> kHalfNames = {
    "DTensor.redistribute", "DTensor.redistribute backward", "DTensor.from_local",
    "DTensor.from_local backward", "DTensor.to_local", "DTensor.to_local backward",
};
// Operators count from 1, so their keys and these never begin alike.
constexpr uint64_t kFirstHalfId = uint64_t{1} << 62;

struct Methods {
  std::array<OpStats, kHalves> stats;
  bool on = false;
};

Methods& methods() {
  static auto* instance = new Methods;  // outlives the interpreter's end
  return *instance;
}

}  // namespace

const char* half_name(Half half) {
  return kHalfNames[static_cast<size_t>(half)];
}

OpStats& half_stats(Half half) {
  return methods().stats[static_cast<size_t>(half)];
}

void count_fallback(Half half, Reason reason) {
  count_fallback(half_stats(half), half_name(half), reason);
}

Key key_of(Half half) {
  return Key(kFirstHalfId + static_cast<uint64_t>(half));
}

void set_methods_on(bool on) {
  methods().on = on;
}

Reason unusual_state() {
  const bool unusual = !methods().on || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
      c10::InferenceMode::is_enabled() ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      at::impl::PythonTorchFunctionTLS::stack_len() > 0 ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PythonDispatcher);
  return unusual ? Reason::kMode : Reason::kNone;
}

Reason read_parts(PyObject* object, Parts& parts) {
  if (!is_dtensor(object)) {
    return Reason::kSubclass;
  }
  PyObject* local_object = local_tensor_slot(object);
  PyObject* spec_object = spec_slot(object);
  if (local_object == nullptr || spec_object == nullptr || !THPVariable_Check(local_object)) {
    return Reason::kUnsupported;
  }
  parts.tensor = &THPVariable_Unpack(object);
  parts.local = &THPVariable_Unpack(local_object);
  if (parts.local->key_set().has(c10::DispatchKey::Python)) {
    return Reason::kLocalSubclass;
  }
  parts.spec = &intern(spec_object);
  if (parts.spec->symbolic) {
    return Reason::kSymInt;
  }
  return parts.spec->participates ? Reason::kNone : Reason::kNotInMesh;
}

Reason read_parts(const at::Tensor& tensor, Parts& parts) {
  return read_parts(python_object(tensor), parts);
}

void add_layout(Key& key, const at::Tensor& local) {
  key.add_word(
      static_cast<uint64_t>(local.scalar_type()) |
      static_cast<uint64_t>(local.device().type()) << 8 |
      static_cast<uint64_t>(local.dim()) << 16);
  for (const int64_t size : local.sizes()) {
    key.add_word(static_cast<uint64_t>(size));
  }
  for (const int64_t stride : local.strides()) {
    key.add_word(static_cast<uint64_t>(stride));
  }
}

PlanPtr find_plan(Half half, const Key& key) {
  PlanPtr plan = plans().find(key);
  OpStats& stats = half_stats(half);
  if (!plan) {
    plans().count_miss();
    count(stats.miss);
  } else if (plan->reason != Reason::kNone) {
    count_fallback(half, plan->reason);
  } else {
    count(stats.cache);
  }
  return plan;
}

void learn(const Key& key, const py::object& spec, const py::object& transform, bool own) {
  auto plan = c10::make_intrusive<Plan>();
  if (spec.is_none()) {
    plan->reason = Reason::kUnsupported;
    plans().insert(key, std::move(plan));
    return;
  }
  SpecPtr interned = intern_shared(spec.ptr());
  if (own && !interned->object.is(spec)) {
    auto copy = std::make_shared<Spec>(*interned);
    copy->object = spec;
    interned = std::move(copy);
  }
  Output output;
  output.kind = Output::Kind::kTensor;
  output.spec = std::move(interned);
  plan->outputs.push_back(std::move(output));
  if (!transform.is_none()) {
    plan->moves.push_back({0, -1, py::cast<std::shared_ptr<Redistribution>>(transform)});
  }
  plans().insert(key, std::move(plan));
}

}  // namespace dtensor_rules
