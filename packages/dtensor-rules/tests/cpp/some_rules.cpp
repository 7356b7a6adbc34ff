// A rule per thing that a compiled rule may do, made on demand: test_compiled.py.
#include <dtensor_rules/rule.h>

#include <stdexcept>

namespace {

using dtensor_rules::Call;
using dtensor_rules::Output;
using dtensor_rules::Placement;
using dtensor_rules::Placements;
using dtensor_rules::Plan;

std::optional<Plan> act(const std::string& what, const Call& call) {
  const Placements& given = call.specs.at(0).placements;
  if (what == "replicated") {  // which torch does not do: visible in the result
    const Placements replicated(given.size());
    return Plan{{Output{replicated}}, {{0, replicated}}};
  }
  if (what == "summed") {
    return Plan{{Output{given, 0, {{4}}, {{3}}, "float64"}}};
  }
  if (what == "doubled") {
    const auto twice = pybind11::module_::import("operator").attr("mul");
    const pybind11::cpp_function doubled([twice](const pybind11::object& local) {
      return twice(local, 2);
    });
    return Plan{{Output{{Placement::shard(1)}, 0, {{2, 4, 4}}}}, {}, {{1, doubled}}};
  }
  if (what == "passed on") {
    return Plan{{Output{call.specs.at(1).placements, 1}}};
  }
  if (what == "in place") {
    return Plan{};
  }
  if (what == "too few axes") {
    return Plan{{Output{{}}}};
  }
  if (what == "no such dim") {
    return Plan{{Output{{Placement::shard(5)}}}};
  }
  if (what == "no such tensor") {
    return Plan{{Output{given, 7}}};
  }
  if (what == "no such dtype") {
    return Plan{{Output{given, 0, {}, {}, "float33"}}};
  }
  if (what == "moved twice") {
    return Plan{{Output{given}}, {{0, given}}, {{0, pybind11::cpp_function([] {})}}};
  }
  if (what == "too many results") {
    return Plan{{Output{given}, Output{given}}};
  }
  if (what == "throws") {
    throw std::invalid_argument("nothing for " + call.op);
  }
  return std::nullopt;
}

void add(const std::string& name, const std::string& op, const std::string& what,
         const std::string& kind, const std::vector<std::string>& placements,
         std::optional<int64_t> rows, bool numbers, std::optional<std::string> before,
         std::optional<std::string> after) {
  dtensor_rules::Rule rule{
      name, op, [what](const Call& call) { return act(what, call); }, kind, placements};
  if (rows) {
    rule.meta = [rows](const Call& call) { return call.specs.at(0).shape.at(0) == *rows; };
  }
  rule.numbers = numbers;
  dtensor_rules::register_rule(rule, {before, after});
}

// What a rule sees of a call, as text.
std::string seen;

void watch(const std::string& op) {
  const auto look = [](const Call& call) -> std::optional<Plan> {
    seen = call.op;
    for (const auto& spec : call.specs) {
      seen += " " + spec.dtype;
      for (const auto size : spec.shape) seen += "," + std::to_string(size);
      for (const auto step : spec.stride) seen += "/" + std::to_string(step);
      for (const auto size : spec.mesh_shape) seen += "@" + std::to_string(size);
      for (const auto& one : spec.placements) {
        switch (one.kind) {
          case Placement::Kind::kReplicate: seen += " R"; break;
          case Placement::Kind::kShard: seen += " S" + std::to_string(one.dim); break;
          case Placement::Kind::kPartial: seen += " P" + one.reduce_op; break;
          case Placement::Kind::kOther:
            seen += " " + std::string(pybind11::str(pybind11::type::of(one.other).attr("__name__")));
        }
      }
    }
    seen += " of " + std::to_string(pybind11::len(call.python.attr("args")));
    return std::nullopt;
  };
  dtensor_rules::register_rule({"watch", op, look});
}

}  // namespace

PYBIND11_MODULE(some_rules, module) {
  namespace py = pybind11;
  module.def("add", add, py::arg("name"), py::arg("op") = "aten.neg.default",
             py::arg("what") = "declines", py::kw_only(), py::arg("kind") = "*",
             py::arg("placements") = std::vector<std::string>{}, py::arg("rows") = py::none(),
             py::arg("numbers") = true, py::arg("before") = py::none(), py::arg("after") = py::none());
  module.def("watch", watch);
  module.def("seen", [] { return seen; });
  module.def("add_empty", [] { dtensor_rules::register_rule({"empty", "aten.neg.default"}); });
}
