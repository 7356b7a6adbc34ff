#include "dtensor_rules/plans/plan.h"

#include <algorithm>

namespace dtensor_rules {

namespace {

SpecPtr optional_spec(const py::handle& spec) {
  return spec.is_none() ? nullptr : intern_shared(spec.ptr());
}

Output read_output(const py::handle& description) {
  Output output;
  if (description.is_none()) {
    return output;
  }
  if (py::isinstance<py::list>(description)) {
    output.kind = Output::Kind::kTensors;
    for (const auto item : description) {
      output.specs.push_back(optional_spec(item));
    }
    return output;
  }
  output.kind = Output::Kind::kTensor;
  if (PyCallable_Check(description.ptr())) {
    output.spec_of_local = py::reinterpret_borrow<py::object>(description);
  } else {
    output.spec = intern_shared(description.ptr());
  }
  return output;
}

c10::OperatorHandle handle_of(const py::object& overload) {
  const auto name = py::cast<std::string>(overload.attr("_schema").attr("name"));
  const auto variant = py::cast<std::string>(overload.attr("_schema").attr("overload_name"));
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), variant.c_str());
}

Value read_value(size_t argument, c10::IValue value) {
  Value result{argument, std::move(value)};
  if (result.value.isIntList()) {
    result.sizes = result.value.toIntVector();
    result.symbolic_sizes.assign(result.sizes.begin(), result.sizes.end());
  }
  return result;
}

TransformPtr read_transform(const py::object& transform) {
  if (py::isinstance<Transform>(transform)) {
    return py::cast<std::shared_ptr<Transform>>(transform);
  }
  return std::make_shared<PythonTransform>(transform);
}

FinishPtr read_finish(const Operator& op, const py::object& finish) {
  if (finish.is_none()) {
    return nullptr;
  }
  if (py::isinstance<Finish>(finish)) {
    return py::cast<std::shared_ptr<Finish>>(finish);
  }
  return std::make_shared<PythonFinish>(
      finish, op.handle.schema().returns().at(0).real_type());
}

}  // namespace

PlanPtr read_plan(const Operator& op, const py::object& description) {
  auto plan = c10::make_intrusive<Plan>();
  const py::object reason = description.attr("reason");
  plan->cacheable = py::cast<bool>(description.attr("cacheable"));
  if (!reason.is_none()) {
    plan->reason = reason_of(py::cast<std::string>(reason).c_str());
    return plan;
  }
  const c10::FunctionSchema* schema = &op.handle.schema();
  if (const py::object instead = description.attr("instead"); !instead.is_none()) {
    plan->instead = handle_of(instead);
    schema = &plan->instead->schema();
    plan->instead_arguments = schema->arguments().size();
  }
  for (const auto move : description.attr("moves")) {
    plan->moves.push_back(
        {py::cast<size_t>(move.attr("argument")), py::cast<int64_t>(move.attr("element")),
         read_transform(move.attr("transform"))});
  }
  for (const auto item : description.attr("values").attr("items")()) {
    const auto pair = py::cast<py::tuple>(item);
    const auto argument = py::cast<size_t>(pair[0]);
    const auto& type = schema->arguments().at(argument).real_type();
    plan->values.push_back(read_value(argument, torch::jit::toIValue(pair[1], type)));
  }
  std::sort(plan->values.begin(), plan->values.end(), [](const Value& a, const Value& b) {
    return a.argument < b.argument;
  });
  for (const auto output : description.attr("outputs")) {
    plan->outputs.push_back(read_output(output));
  }
  for (const auto item : description.attr("given").attr("items")()) {
    const auto pair = py::cast<py::tuple>(item);
    plan->given.emplace_back(py::cast<size_t>(pair[0]), intern_shared(pair[1].ptr()));
  }
  plan->finish = read_finish(op, description.attr("finish"));
  if (const py::object rule = description.attr("rule"); !rule.is_none()) {
    plan->rule = py::cast<std::shared_ptr<RuleCounter>>(rule);
  }
  return plan;
}

}  // namespace dtensor_rules
