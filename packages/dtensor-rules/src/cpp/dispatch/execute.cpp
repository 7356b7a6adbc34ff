#include "dtensor_rules/dispatch/execute.h"

#include <ATen/core/List.h>

#include "dtensor_rules/dispatch/local.h"
#include "dtensor_rules/dispatch/wrap.h"

namespace dtensor_rules {

namespace {

using torch::jit::Stack;

// Puts local tensors where the DTensors are. Lists are copied: the caller's own stay as they are.
void place_locals(const Plan& plan, const Call& call, c10::IValue* arguments) {
  Walk walk(call, plan);
  for (const auto& dtensor : call.dtensors) {
    c10::IValue& argument = arguments[dtensor.argument];
    at::Tensor local = dtensor.local_tensor();
    if (const Transform* transform = walk.transform(dtensor.argument, dtensor.element)) {
      local = transformed(*transform, local);
    }
    if (dtensor.element < 0) {
      argument = std::move(local);
      continue;
    }
    argument.toList().set(static_cast<size_t>(dtensor.element), std::move(local));
  }
}

void copy_lists(const Call& call, c10::IValue* arguments) {
  int64_t copied = -1;
  for (const auto& dtensor : call.dtensors) {
    if (dtensor.element >= 0 && static_cast<int64_t>(dtensor.argument) != copied) {
      arguments[dtensor.argument] = arguments[dtensor.argument].toList().copy();
      copied = static_cast<int64_t>(dtensor.argument);
    }
  }
}

// Calls another operator than the one called: its arguments take the place of the call's.
void call_instead(const Plan& plan, size_t arguments, Stack& stack) {
  Stack other(plan.instead_arguments);
  const size_t shared = std::min(arguments, plan.instead_arguments);
  for (size_t index = 0; index < shared; ++index) {
    other[index] = std::move(stack[stack.size() - arguments + index]);
  }
  for (const auto& value : plan.values) {
    other[value.argument] = value.value;
  }
  plan.instead->callBoxed(other);
  torch::jit::drop(stack, arguments);
  stack.insert(stack.end(), other.begin(), other.end());
}

SpecPtr spec_for(Output& output, const at::Tensor& local) {
  if (!output.spec) [[unlikely]] {
    const py::object spec = output.spec_of_local(local);
    output.spec = intern_shared(spec.ptr());
  }
  return output.spec;
}

void wrap_results(Plan& plan, const at::Tensor* base, Stack& stack) {
  const size_t first = stack.size() - plan.outputs.size();
  for (size_t index = 0; index < plan.outputs.size(); ++index) {
    Output& output = plan.outputs[index];
    c10::IValue& result = stack[first + index];
    if (output.kind == Output::Kind::kTensors) {
      result = wrapped(output, result.toTensorVector());
    } else if (output.kind == Output::Kind::kTensor) {
      result = wrapped(output, std::move(result).toTensor(), base);
    }
  }
}

// The `out=` tensors are the results, and mean from now on what the operator made of them.
void return_given(const Plan& plan, const std::vector<c10::IValue>& tensors, Stack& stack) {
  torch::jit::drop(stack, plan.given.size());
  for (size_t index = 0; index < tensors.size(); ++index) {
    PyObject* object = python_object(tensors[index].toTensor());
    PyObject*& spec = slot(object, torch_classes().spec_offset);
    py::object next = plan.given[index].second->object;
    PyObject* before = spec;
    spec = next.release().ptr();
    Py_XDECREF(before);
    stack.push_back(tensors[index]);
  }
}

void run_local(const Operator& op, const Plan& plan, const Call& call, Stack& stack) {
  c10::IValue* arguments = stack.data() + (stack.size() - op.arguments);
  copy_lists(call, arguments);
  place_locals(plan, call, arguments);
  if (plan.instead) {
    call_instead(plan, op.arguments, stack);
    return;
  }
  for (const auto& value : plan.values) {
    arguments[value.argument] = value.value;
  }
  op.handle.callBoxed(stack);
}

}  // namespace

at::Tensor wrapped(Output& output, at::Tensor local, const at::Tensor* base) {
  if (output.kind == Output::Kind::kLocal || !local.defined()) {
    return local;
  }
  const SpecPtr spec = spec_for(output, local);
  return base != nullptr ? wrap_view(std::move(local), *spec, *base)
                         : wrap(std::move(local), *spec);
}

// Lists of views share no storage with their base, in torch as here.
std::vector<at::Tensor> wrapped(const Output& output, std::vector<at::Tensor> locals) {
  for (size_t index = 0; index < locals.size(); ++index) {
    if (const SpecPtr& spec = output.specs.at(index)) {
      locals[index] = wrap(std::move(locals[index]), *spec);
    }
  }
  return locals;
}

void execute(const Operator& op, Plan& plan, const Call& call, Stack& stack) {
  const size_t first = stack.size() - op.arguments;
  if (!plan.given.empty()) {
    std::vector<c10::IValue> given;
    for (const auto& [argument, spec] : plan.given) {
      given.push_back(stack[first + argument]);
    }
    run_local(op, plan, call, stack);
    return_given(plan, given, stack);
    return;
  }
  if (op.is_in_place) {
    c10::IValue self = stack[first];
    run_local(op, plan, call, stack);
    if (op.returns != 0) {
      stack.back() = std::move(self);
    }
    return;
  }
  if (op.is_view) {
    const at::Tensor base = stack[first].toTensor();
    run_local(op, plan, call, stack);
    wrap_results(plan, &base, stack);
    return;
  }
  run_local(op, plan, call, stack);
  if (plan.finish) {
    stack.back() = plan.finish->apply(stack.back());
    return;
  }
  wrap_results(plan, nullptr, stack);
}

}  // namespace dtensor_rules
