// Torch's question to every argument that is no plain tensor: does your class define
// `__torch_function__`?
#pragma once

#include "dtensor_rules/python.h"

namespace dtensor_rules {

// Answers it for DTensors from the class, at once, from here on; or no longer.
void set_attribute_answered(bool answered);

}  // namespace dtensor_rules
