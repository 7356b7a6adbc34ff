#include <pybind11/pybind11.h>

#include "register.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "Compiled parts of ragged_shard.planner; see _core.pyi.";
  ragged_shard::register_search(module);
}
