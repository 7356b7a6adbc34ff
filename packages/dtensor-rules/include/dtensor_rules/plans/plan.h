// How one kind of call is executed: made once by planning.py, run at every call with its key.
#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "dtensor_rules/plans/finish.h"
#include "dtensor_rules/plans/operator.h"
#include "dtensor_rules/plans/spec.h"
#include "dtensor_rules/plans/transform.h"

namespace dtensor_rules {

// An argument's tensor that is transformed first; element -1: the argument itself, no list.
struct Move {
  size_t argument;
  int64_t element;
  TransformPtr transform;
};

// An argument that is no tensor and gets another value, such as a shape that becomes local.
struct Value {
  size_t argument;
  c10::IValue value;
  // The same where it is a list of ints, for typed kernels, which take references.
  std::vector<int64_t> sizes = {};
  std::vector<c10::SymInt> symbolic_sizes = {};
};

// One result: as the local operator gives it, a DTensor, or a list of DTensors.
struct Output {
  enum class Kind { kLocal, kTensor, kTensors };
  Kind kind = Kind::kLocal;
  SpecPtr spec;
  std::vector<SpecPtr> specs;  // null: an undefined tensor, or a scalar that stays local
  // Where the spec follows from the first result: a Python function of the local tensor, once.
  py::object spec_of_local;
};

// How often a rule's plans ran; shared by the rule and its plans.
struct RuleCounter {
  std::atomic<uint64_t> hits = 0;
};

struct Plan final : c10::intrusive_ptr_target {
  Reason reason = Reason::kNone;  // other than none: the call is torch's
  bool cacheable = true;          // false: asked again next time
  std::vector<Move> moves;
  std::vector<Value> values;
  // Another operator to call, with these arguments of the call (or values) in its own order.
  std::optional<c10::OperatorHandle> instead;
  size_t instead_arguments = 0;
  std::vector<Output> outputs;
  // Arguments given as `out=`, which are the results, and their specs from then on.
  std::vector<std::pair<size_t, SpecPtr>> given;
  FinishPtr finish;  // null, or makes the one result out of the local one
  std::shared_ptr<RuleCounter> rule;

  // The operator called is the one that runs, and makes the results: typed kernels do no more.
  bool is_direct() const { return reason == Reason::kNone && !instead && given.empty(); }
};

using PlanPtr = c10::intrusive_ptr<Plan>;

// The plan that planning.py describes (`_core.pyi` has the fields). Needs the GIL.
PlanPtr read_plan(const Operator& op, const py::object& description);

}  // namespace dtensor_rules
