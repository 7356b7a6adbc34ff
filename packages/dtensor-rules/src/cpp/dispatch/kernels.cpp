#include "dtensor_rules/dispatch/kernels.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <unordered_map>

#include "dtensor_rules/dispatch/call.h"
#include "dtensor_rules/dispatch/dispatch.h"
#include "dtensor_rules/dispatch/typed.h"

namespace dtensor_rules {

namespace {

struct Kernels {
  std::vector<std::unique_ptr<Operator>> operators;
  std::unordered_map<std::string, Operator*> by_name;
  std::vector<c10::RegistrationHandleRAII> registered;
};

Kernels& kernels() {
  static auto* instance = new Kernels;  // outlives the interpreter's end
  return *instance;
}

// For operators of any signature.
class Boxed final : public c10::OperatorKernel {
 public:
  explicit Boxed(Operator* op) : op_(op) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard below(kBeforePython);
    dispatch(*op_, *stack);
  }

 private:
  Operator* op_;
};

Operator& find_or_add(const py::object& overload, std::vector<bool> by_value) {
  Kernels& all = kernels();
  const std::string name = py::str(overload);
  if (Operator* known = find_operator(name)) {
    known->read_by_value(std::move(by_value));
    return *known;
  }
  const auto schema = overload.attr("_schema");
  auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      py::cast<std::string>(schema.attr("name")).c_str(),
      py::cast<std::string>(schema.attr("overload_name")).c_str());
  all.operators.push_back(std::make_unique<Operator>(handle, overload, std::move(by_value)));
  return *(all.by_name[name] = all.operators.back().get());
}

void add(const Operator& op, c10::DispatchKey key, c10::KernelFunction kernel) {
  kernels().registered.push_back(c10::Dispatcher::singleton().registerImpl(
      op.handle.operator_name(), key, std::move(kernel), std::nullopt, nullptr, "dtensor_rules"));
}

}  // namespace

bool install_kernel(const py::object& overload, std::vector<bool> by_value) {
  Operator& op = find_or_add(overload, std::move(by_value));
  if (op.installed) {
    return false;
  }
  if (auto typed = typed_kernels(op)) {
    op.typed = true;
    add(op, c10::DispatchKey::Python, std::move(typed->at_python));
    add(op, c10::DispatchKey::PythonTLSSnapshot, std::move(typed->at_snapshot));
  } else {
    add(op, c10::DispatchKey::Python,
        c10::KernelFunction::makeFromBoxedKernel(
            c10::BoxedKernel::makeFromFunctor(std::make_unique<Boxed>(&op))));
  }
  op.installed = true;
  return true;
}

void remove_kernels() {
  kernels().registered.clear();
  for (auto& op : kernels().operators) {
    op->installed = false;
  }
}

const std::vector<std::unique_ptr<Operator>>& operators() {
  return kernels().operators;
}

Operator* find_operator(const std::string& name) {
  const auto known = kernels().by_name.find(name);
  return known == kernels().by_name.end() ? nullptr : known->second;
}

std::vector<uint64_t> key_words(const py::object& overload, const py::tuple& arguments) {
  const std::string name = py::str(overload);
  const Operator* known = find_operator(name);
  TORCH_CHECK(known != nullptr, name, " has no kernel here");
  const Operator& op = *known;
  torch::jit::Stack stack;
  for (size_t index = 0; index < op.arguments; ++index) {
    const auto& type = op.handle.schema().arguments()[index].real_type();
    stack.push_back(torch::jit::toIValue(arguments[index], type));
  }
  Call call(op);
  const Reason reason = read_call(op, stack, call);
  TORCH_CHECK(reason == Reason::kNone, op.name, " is left to torch: ", reason_name(reason));
  return call.key.words().vec();
}

}  // namespace dtensor_rules
