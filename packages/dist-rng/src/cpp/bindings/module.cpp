#include <pybind11/pybind11.h>

namespace dist_rng {

// Each is defined in the file of its name.
void register_grid(pybind11::module_& module);
void register_cpu(pybind11::module_& module);
void register_philox(pybind11::module_& module);

}  // namespace dist_rng

PYBIND11_MODULE(_core, module) {
  module.doc() = "Compiled parts of dist-rng; see _core.pyi.";
  dist_rng::register_grid(module);
  dist_rng::register_cpu(module);
  dist_rng::register_philox(module);
}
