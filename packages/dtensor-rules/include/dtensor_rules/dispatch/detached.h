// What autograd saves of a DTensor, without the dispatcher.
#pragma once

#include "dtensor_rules/torch.h"

namespace dtensor_rules {

// A DTensor as `detach()` below autograd makes it, by aten.detach's plan; null where that is left to
// torch. Takes the GIL.
c10::intrusive_ptr<c10::TensorImpl> detached(const c10::TensorImpl& dtensor);

}  // namespace dtensor_rules
