#include <pybind11/pybind11.h>

#include "register.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "Compiled parts of fsdp.optim; see _core.pyi.";
  fsdp::register_loops(module);
  fsdp::register_step(module);
}
