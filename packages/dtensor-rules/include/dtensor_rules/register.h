// The parts of the extension module; each register_X.cpp defines one.
#pragma once

#include <pybind11/pybind11.h>

namespace dtensor_rules {

void register_redistribute(pybind11::module_& module);

}  // namespace dtensor_rules
