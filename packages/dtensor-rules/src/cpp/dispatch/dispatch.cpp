#include "dtensor_rules/dispatch/dispatch.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/PyInterpreter.h>

#include "dtensor_rules/dispatch/arguments.h"
#include "dtensor_rules/plans/cache.h"
#include "dtensor_rules/dispatch/execute.h"
#include "dtensor_rules/dispatch/explicit_only.h"
#include "dtensor_rules/dispatch/kernels.h"
#include "dtensor_rules/dispatch/watch.h"

namespace dtensor_rules {

const c10::DispatchKeySet kBeforePython =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
     c10::DispatchKeySet(c10::DispatchKey::Python));

namespace {

using torch::jit::Stack;

struct Functions {
  py::object planner;
  py::object checker = py::none();
};

Functions& functions() {
  static auto* instance = new Functions;  // outlives the interpreter's end
  return *instance;
}

// Whether there is a checker, for those who do not hold the GIL.
std::atomic<bool> checking = false;

thread_local Path path = Path::kAsSet;
// A plan is being made on this thread.
thread_local bool planning = false;

bool unusual_mode() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() || c10::InferenceMode::is_enabled();
}

c10::ArrayRef<c10::IValue> arguments_of(const Operator& op, const Stack& stack) {
  return c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - op.arguments);
}

// Torch's own dispatch, as its fallback at this key would do it.
void fall_back(Operator& op, Reason reason, Stack& stack) {
  // What torch does on fake tensors of its own, to learn a shape, is nobody's call.
  if (!planning && !(reason == Reason::kMode && path != Path::kAsSet)) {
    count_fallback(op.stats, op.name.c_str(), reason);
  }
  (*getPyInterpreter())->dispatch(op.handle, &stack);
}

PlanPtr make_plan(Operator& op, Call& call, const Stack& stack) {
  plans().count_miss();
  const auto arguments = python_arguments(op.handle.schema(), arguments_of(op, stack));
  const bool outer = std::exchange(planning, true);
  const auto restore = c10::make_scope_exit([outer] { planning = outer; });
  PlanPtr plan =
      read_plan(op, functions().planner(op.overload, arguments.args, arguments.kwargs));
  if (plan->cacheable) {
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
  PlanPtr plan = plans().find(call.key);
  const bool missed = !plan;
  if (missed) {
    plan = make_plan(op, call, stack);
  }
  if (plan->reason != Reason::kNone) {
    return plan->reason;
  }
  if (!may_run(*plan)) [[unlikely]] {
    return Reason::kExplicitOnly;
  }
  count_run(op, *plan, missed);
  execute(op, *plan, call, stack);
  return Reason::kNone;
}

// The call is the checker's, which makes it twice.
void check(Operator& op, Stack& stack) {
  const auto& schema = op.handle.schema();
  const auto arguments = python_arguments(schema, arguments_of(op, stack));
  const py::object result = functions().checker(op.overload, arguments.args, arguments.kwargs);
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

}  // namespace

bool gate_is_open() {
  return !unusual_mode() &&
      (path == Path::kUnchecked ||
       (path == Path::kAsSet && !checking.load(std::memory_order_relaxed)));
}

void count_run(Operator& op, const Plan& plan, bool missed) {
  count(missed ? op.stats.miss : plan.rule ? op.stats.rule : op.stats.cache);
  if (plan.rule) {
    count(plan.rule->hits);
  }
}

void dispatch(Operator& op, Stack& stack) {
  if (unusual_mode()) {
    fall_back(op, Reason::kMode, stack);
    return;
  }
  if (path == Path::kTorch) {
    fall_back(op, Reason::kChecking, stack);
    return;
  }
  const Gil gil;
  if (path == Path::kAsSet && !functions().checker.is_none()) [[unlikely]] {
    check(op, stack);
    return;
  }
  if (const Reason reason = run(op, stack); reason != Reason::kNone) {
    fall_back(op, reason, stack);
  }
}

void set_planner(py::object planner) {
  functions().planner = std::move(planner);
}

void set_checker(py::object checker) {
  checking = !checker.is_none();
  functions().checker = std::move(checker);
}

Path set_path(Path next) {
  return std::exchange(path, next);
}

}  // namespace dtensor_rules
