// Rules in C++: include this in an extension module of yours, and register them when it is loaded.
//
// Nothing of C++ passes from one module to the other, only Python's own numbers, strings, tuples
// and functions: any compiler for C++17 and any pybind11 will do (torch brings one), and nothing is
// linked. A rule is asked once per key of the cache, so the way through Python costs nothing later.
// Everything here needs the GIL, and rules are called with it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

// Hidden, as pybind11 is: two modules that were compiled with different versions of this header
// never take one's function for the other's.
namespace dtensor_rules __attribute__((visibility("hidden"))) {

// What one mesh axis does to a tensor.
struct Placement {
  enum class Kind { kReplicate, kShard, kPartial, kOther };
  Kind kind = Kind::kReplicate;
  int64_t dim = 0;                       // of kShard
  std::string reduce_op = {};            // of kPartial, as "sum"
  pybind11::object other = {};           // of kOther, an object of another class: pass it on

  static Placement replicate() { return {}; }
  static Placement shard(int64_t dim) { return {Kind::kShard, dim}; }
  static Placement partial(std::string op = "sum") { return {Kind::kPartial, 0, std::move(op)}; }

  friend bool operator==(const Placement& left, const Placement& right) {
    return left.kind == right.kind &&
        (left.kind == Kind::kOther
             ? left.other.equal(right.other)
             : left.dim == right.dim && left.reduce_op == right.reduce_op);
  }
  friend bool operator!=(const Placement& left, const Placement& right) {
    return !(left == right);
  }
};

// One per mesh axis.
using Placements = std::vector<Placement>;

// A DTensor of the call.
struct Spec {
  Placements placements;
  std::vector<int64_t> mesh_shape;
  std::vector<int64_t> shape;   // global
  std::vector<int64_t> stride;  // global, in elements
  std::string dtype;            // as "float32"
};

// A call that needs a plan.
struct Call {
  std::string op;            // as "aten.add.Tensor"
  std::vector<Spec> specs;   // of the DTensors among the positional arguments, lists opened
  pybind11::object python;   // the same as `dtensor_rules.Call`: all arguments, meshes
};

// One result. What is not said is that of the DTensor with number `like` among the call's specs.
struct Output {
  Placements placements;
  size_t like = 0;
  std::optional<std::vector<int64_t>> shape = {};   // global
  std::optional<std::vector<int64_t>> stride = {};  // contiguous, where a shape is given
  std::optional<std::string> dtype = {};
};

// How the call is executed.
struct Plan {
  // One per result; none for an operator that works in place.
  std::vector<Output> outputs;
  // By number among the call's specs: placements that a tensor gets first.
  std::map<size_t, Placements> redistribute = {};
  // Instead, by number: a Python function from the local tensor to the one that the operator gets.
  std::map<size_t, pybind11::function> transform = {};
};

// A function of one `const Call&`. Its own type for the sake of the compiler's message.
template <typename Result>
struct FunctionOfCall : std::function<Result(const Call&)> {
  using Base = std::function<Result(const Call&)>;
  FunctionOfCall() = default;
  template <typename Function>
  FunctionOfCall(Function function) : Base(std::move(function)) {  // NOLINT: meant to convert
    static_assert(std::is_invocable_r_v<Result, Function&, const Call&>,
                  "dtensor_rules: a rule's action takes one const Call& and returns a Plan or "
                  "std::nullopt; its meta takes one const Call& and returns a bool");
  }
};

// The fields of `dtensor_rules.Rule`.
struct Rule {
  std::string name;
  std::string op;  // `*` and `?` match as in file names
  // std::nullopt leaves the call to the rules behind. Every rank must decide alike.
  FunctionOfCall<std::optional<Plan>> action = {};
  std::string kind = "*";
  std::vector<std::string> placements = {};  // a word per DTensor; empty: any
  FunctionOfCall<bool> meta = {};            // empty: any
  // False, if neither function reads scalars that torch's strategies do not (as `alpha`): calls that
  // differ in them then share a plan.
  bool numbers = true;
};

// Where in the table: at its end, or beside the rule of this name.
struct Where {
  std::optional<std::string> before = {};
  std::optional<std::string> after = {};
};

namespace wire {

// What dtensor_rules/compiled.py speaks; another number is refused there.
constexpr int kVersion = 2;

using OnePlacement = std::tuple<std::string, int64_t, std::string, pybind11::object>;
using OneSpec = std::tuple<std::vector<OnePlacement>, std::vector<int64_t>, std::vector<int64_t>,
                           std::vector<int64_t>, std::string>;

constexpr const char* kKinds[] = {"replicate", "shard", "partial", "other"};

inline Placement read(const OnePlacement& sent) {
  const auto& [kind, dim, reduce_op, other] = sent;
  Placement placement{Placement::Kind::kOther, dim, reduce_op, other};
  for (int index = 0; index < 4; ++index) {
    if (kind == kKinds[index]) {
      placement.kind = static_cast<Placement::Kind>(index);
    }
  }
  return placement;
}

inline std::vector<OnePlacement> sent(const Placements& placements) {
  std::vector<OnePlacement> result;
  for (const auto& one : placements) {
    const pybind11::object other = one.other ? one.other : pybind11::none();
    result.emplace_back(kKinds[static_cast<int>(one.kind)], one.dim, one.reduce_op, other);
  }
  return result;
}

inline Call read(const std::string& op, const std::vector<OneSpec>& specs,
                 const pybind11::object& python) {
  Call call{op, {}, python};
  for (const auto& [placements, mesh_shape, shape, stride, dtype] : specs) {
    Spec& spec = call.specs.emplace_back(Spec{{}, mesh_shape, shape, stride, dtype});
    for (const auto& one : placements) {
      spec.placements.push_back(read(one));
    }
  }
  return call;
}

inline pybind11::object sent(const std::optional<Plan>& plan) {
  if (!plan) {
    return pybind11::none();
  }
  pybind11::list outputs;
  for (const auto& one : plan->outputs) {
    outputs.append(pybind11::make_tuple(
        sent(one.placements), one.like, one.shape, one.stride, one.dtype));
  }
  pybind11::dict redistribute;
  for (const auto& [number, placements] : plan->redistribute) {
    redistribute[pybind11::int_(number)] = sent(placements);
  }
  return pybind11::make_tuple(outputs, redistribute, plan->transform);
}

}  // namespace wire

// Puts a rule into the table that Python's rules are in: `dtensor_rules.rules()` lists it with its
// hits, `dtensor_rules.remove_rule()` takes it out. Raises Python's errors (error_already_set).
inline void register_rule(Rule rule, const Where& where = {}) {
  pybind11::object action = pybind11::none();
  if (rule.action) {
    action = pybind11::cpp_function(
        [decide = std::move(rule.action)](
            const std::string& op, const std::vector<wire::OneSpec>& specs,
            const pybind11::object& python) {
          return wire::sent(decide(wire::read(op, specs, python)));
        });
  }
  pybind11::object meta = pybind11::none();
  if (rule.meta) {
    meta = pybind11::cpp_function(
        [fits = std::move(rule.meta)](
            const std::string& op, const std::vector<wire::OneSpec>& specs,
            const pybind11::object& python) { return fits(wire::read(op, specs, python)); });
  }
  pybind11::module_::import("dtensor_rules.registry.compiled")
      .attr("register")(wire::kVersion, rule.name, rule.op, action, rule.kind,
                        pybind11::tuple(pybind11::cast(rule.placements)), meta, rule.numbers,
                        where.before, where.after);
}

}  // namespace dtensor_rules
