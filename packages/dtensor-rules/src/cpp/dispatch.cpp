#include "dtensor_rules/dispatch.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>

#include <unordered_map>

#include "dtensor_rules/arguments.h"
#include "dtensor_rules/cache.h"
#include "dtensor_rules/execute.h"
#include "dtensor_rules/watch.h"

namespace dtensor_rules {

namespace {

using torch::jit::Stack;

// The keys that come before Python: autograd, ADInplaceOrView and the like have done their part.
// torch's own fallback at this key excludes the same.
const c10::DispatchKeySet kBeforePython =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
     c10::DispatchKeySet(c10::DispatchKey::Python));

struct State {
  std::vector<std::unique_ptr<Operator>> operators;
  std::unordered_map<std::string, Operator*> by_name;
  std::vector<c10::RegistrationHandleRAII> kernels;
  py::object planner;
  py::object checker = py::none();
};

State& state() {
  static auto* instance = new State;  // outlives the interpreter's end
  return *instance;
}

thread_local Path path = Path::kAsSet;

c10::ArrayRef<c10::IValue> arguments_of(const Operator& op, const Stack& stack) {
  return c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - op.arguments);
}

// Torch's own dispatch, as its fallback at this key would do it.
void leave(Operator& op, Reason reason, Stack& stack) {
  op.stats.count_left(reason);
  (*getPyInterpreter())->dispatch(op.handle, &stack);
}

PlanPtr make_plan(const Operator& op, Call& call, const Stack& stack) {
  const auto arguments = python_arguments(op.handle.schema(), arguments_of(op, stack));
  PlanPtr plan = read_plan(op, state().planner(op.overload, arguments.args, arguments.kwargs));
  if (plan->keep) {
    plans().insert(std::move(call.key), plan);
  }
  return plan;
}

// Whether to leave the call to torch, for a reason; none: it was executed.
Reason run(Operator& op, Stack& stack) {
  check_watched();
  Call call(op);
  if (const Reason reason = read_call(op, arguments_of(op, stack), call); reason != Reason::kNone) {
    return reason;
  }
  // Held: another thread may clear the cache while this one waits for other ranks.
  PlanPtr plan = PlanPtr::reclaim_copy(plans().find(call.key));
  const bool missed = !plan;
  if (missed) {
    plan = make_plan(op, call, stack);
  }
  if (plan->reason != Reason::kNone) {
    return plan->reason;
  }
  if (missed) {
    count(op.stats.miss);
  } else if (plan->rule) {
    count(op.stats.rule);
  } else {
    count(op.stats.cache);
  }
  if (plan->rule) {
    count(plan->rule->hits);
  }
  execute(op, *plan, call, stack);
  return Reason::kNone;
}

// The call is the checker's, which makes it twice.
void check(Operator& op, Stack& stack) {
  const auto& schema = op.handle.schema();
  const auto arguments = python_arguments(schema, arguments_of(op, stack));
  const py::object result = state().checker(op.overload, arguments.args, arguments.kwargs);
  torch::jit::drop(stack, op.arguments);
  if (op.returns == 1) {
    stack.push_back(torch::jit::toIValue(result, schema.returns()[0].real_type()));
    return;
  }
  for (size_t index = 0; index < op.returns; ++index) {
    const py::object one = py::cast<py::sequence>(result)[index];
    stack.push_back(torch::jit::toIValue(one, schema.returns()[index].real_type()));
  }
}

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(Operator* op) : op_(op) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard below(kBeforePython);
    if (c10::impl::TorchDispatchModeTLS::any_modes_set() || c10::InferenceMode::is_enabled()) {
      leave(*op_, Reason::kMode, *stack);
      return;
    }
    if (path == Path::kTorch) {
      leave(*op_, Reason::kChecking, *stack);
      return;
    }
    const py::gil_scoped_acquire gil;
    if (path == Path::kAsSet && !state().checker.is_none()) [[unlikely]] {
      check(*op_, *stack);
      return;
    }
    if (const Reason reason = run(*op_, *stack); reason != Reason::kNone) {
      leave(*op_, reason, *stack);
    }
  }

 private:
  Operator* op_;
};

Operator& find_or_add(const py::object& overload, std::vector<bool> by_value) {
  State& all = state();
  const std::string name = py::str(overload);
  if (const auto known = all.by_name.find(name); known != all.by_name.end()) {
    return *known->second;
  }
  const auto schema = overload.attr("_schema");
  auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
      py::cast<std::string>(schema.attr("name")).c_str(),
      py::cast<std::string>(schema.attr("overload_name")).c_str());
  all.operators.push_back(std::make_unique<Operator>(handle, overload, std::move(by_value)));
  return *(all.by_name[name] = all.operators.back().get());
}

}  // namespace

bool install_kernel(const py::object& overload, std::vector<bool> by_value) {
  Operator& op = find_or_add(overload, std::move(by_value));
  if (op.installed) {
    return false;
  }
  auto kernel = c10::KernelFunction::makeFromBoxedKernel(
      c10::BoxedKernel::makeFromFunctor(std::make_unique<Kernel>(&op)));
  state().kernels.push_back(c10::Dispatcher::singleton().registerImpl(
      op.handle.operator_name(), c10::DispatchKey::Python, std::move(kernel), std::nullopt, nullptr,
      "dtensor_rules"));
  op.installed = true;
  return true;
}

void set_planner(py::object planner) {
  state().planner = std::move(planner);
}

void remove_kernels() {
  state().kernels.clear();
  for (auto& op : state().operators) {
    op->installed = false;
  }
}

const std::vector<std::unique_ptr<Operator>>& operators() {
  return state().operators;
}

std::vector<uint64_t> key_words(const py::object& overload, const py::tuple& arguments) {
  const auto known = state().by_name.find(py::str(overload));
  TORCH_CHECK(known != state().by_name.end(), py::str(overload), " has no kernel here");
  const Operator& op = *known->second;
  Stack stack;
  for (size_t index = 0; index < op.arguments; ++index) {
    const auto& type = op.handle.schema().arguments()[index].real_type();
    stack.push_back(torch::jit::toIValue(arguments[index], type));
  }
  Call call(op);
  const Reason reason = read_call(op, stack, call);
  TORCH_CHECK(reason == Reason::kNone, op.name, " is left to torch: ", reason_name(reason));
  return call.key.words().vec();
}

void set_checker(py::object checker) {
  state().checker = std::move(checker);
}

Path set_path(Path next) {
  return std::exchange(path, next);
}

}  // namespace dtensor_rules
