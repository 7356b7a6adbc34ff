// Runs a plan: local arguments, the local operator, wrappers around its results.
#pragma once

#include "dtensor_rules/call.h"
#include "dtensor_rules/plan.h"

namespace dtensor_rules {

// Replaces the call's arguments on top of the stack by its results. Needs the GIL, and may give it
// up while other ranks are waited for.
void execute(const Operator& op, Plan& plan, const Call& call, torch::jit::Stack& stack);

}  // namespace dtensor_rules
