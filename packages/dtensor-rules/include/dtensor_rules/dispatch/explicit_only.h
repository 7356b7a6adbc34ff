// torch's ExplicitRedistributionContext, under which arguments may not be moved unasked.
#pragma once

#include "dtensor_rules/plans/plan.h"

namespace dtensor_rules {

// Where torch keeps the active context: the `threading.local` of its class, or None.
void set_explicit_only(py::object local);

// Whether this thread is within such a context, be it one that allows all. Needs the GIL; some 50
// nanoseconds, so it is asked only where a plan moves arguments.
bool is_explicit_only();

// Whether a plan without a reason may be run now; if not, its call is torch's, which knows better.
inline bool may_run(const Plan& plan) {
  return plan.moves.empty() || !is_explicit_only();
}

}  // namespace dtensor_rules
