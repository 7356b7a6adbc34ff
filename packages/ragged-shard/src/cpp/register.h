// What module.cpp calls: each register_X.cpp binds one thing.
#pragma once

#include <pybind11/pybind11.h>

namespace ragged_shard {

void register_search(pybind11::module_& module);

}  // namespace ragged_shard
