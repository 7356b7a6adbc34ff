// The parts of the extension module; each register_X.cpp defines one.
#pragma once

#include <pybind11/pybind11.h>

namespace dtensor_rules {

void register_cache(pybind11::module_& module);
void register_dispatch(pybind11::module_& module);
void register_methods(pybind11::module_& module);
void register_redistribute(pybind11::module_& module);
void register_specs(pybind11::module_& module);
void register_stats(pybind11::module_& module);

}  // namespace dtensor_rules
