// Runs a plan: local arguments, the local operator, wrappers around its results.
#pragma once

#include "dtensor_rules/dispatch/call.h"
#include "dtensor_rules/plans/plan.h"

namespace dtensor_rules {

// Replaces the call's arguments on top of the stack by its results. Needs the GIL, and may give it
// up while other ranks are waited for.
void execute(const Operator& op, Plan& plan, const Call& call, torch::jit::Stack& stack);

// One result of the local operator as the call's: as it is, or a DTensor. base: the DTensor of which
// it is a view; null if none. Needs the GIL.
at::Tensor wrapped(Output& output, at::Tensor local, const at::Tensor* base);
// The same of a list of results.
std::vector<at::Tensor> wrapped(const Output& output, std::vector<at::Tensor> locals);

}  // namespace dtensor_rules
