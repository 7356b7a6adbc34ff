// What module.cpp calls: each register_X.cpp binds one thing.
#pragma once

#include <pybind11/pybind11.h>

namespace fsdp {

void register_loops(pybind11::module_& module);
void register_step(pybind11::module_& module);

}  // namespace fsdp
