// What module.cpp calls: each register_X.cpp binds one thing.
#pragma once

#include <pybind11/pybind11.h>

namespace dist_rng {

void register_walk(pybind11::module_& module);
void register_cpu(pybind11::module_& module);
void register_philox(pybind11::module_& module);

}  // namespace dist_rng
