// The way of a call: gate, key, plan, execution; or torch's own dispatch, untouched.
#pragma once

#include "dtensor_rules/plans/operator.h"
#include "dtensor_rules/plans/plan.h"

namespace dtensor_rules {

// The keys that come before Python: autograd, ADInplaceOrView and the like have done their part
// when a call gets there, and are excluded below it. Torch's own fallback excludes the same.
extern const c10::DispatchKeySet kBeforePython;

// Makes the call on top of the stack, or leaves it to torch. The keys before Python are excluded.
void dispatch(Operator& op, torch::jit::Stack& stack);

// Whether a call on this thread may run a plan now; if not, dispatch() knows what to do with it.
bool gate_is_open();

// One more run of this plan, which was made for it (missed) or known. Needs the GIL.
void count_run(Operator& op, const Plan& plan, bool missed);

// planner is planning.planner.plan: what it returns, plan.h reads.
void set_planner(py::object planner);

// The checking mode: a Python function of (overload, args, kwargs) that does calls in place of the
// library, and compares; None switches it off (checking.py).
void set_checker(py::object checker);

// What this thread does with its calls until told otherwise.
enum class Path : uint8_t {
  kAsSet,     // checked where a checker is set
  kUnchecked, // planned and executed, without the checker
  kTorch,     // left to torch, counted as `checking`
};
// Sets it; what it was before.
Path set_path(Path path);

}  // namespace dtensor_rules
