#include "dtensor_rules/register.h"

namespace dtensor_rules {

void register_redistribute(pybind11::module_&) {}

}  // namespace dtensor_rules
