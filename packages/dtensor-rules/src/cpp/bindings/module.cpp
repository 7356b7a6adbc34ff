#include "dtensor_rules/register.h"

PYBIND11_MODULE(_core, module) {
  module.attr("torch_version") = DTENSOR_RULES_TORCH_VERSION;
  dtensor_rules::register_cache(module);
  dtensor_rules::register_dispatch(module);
  dtensor_rules::register_redistribute(module);
  dtensor_rules::register_methods(module);
  dtensor_rules::register_specs(module);
  dtensor_rules::register_stats(module);
}
