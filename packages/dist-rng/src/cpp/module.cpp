#include <pybind11/pybind11.h>

#include "register.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "Compiled parts of dist-rng; see _core.pyi.";
  dist_rng::register_walk(module);
  dist_rng::register_cpu(module);
  dist_rng::register_philox(module);
}
