#include "dtensor_rules/plans/cache.h"
#include "dtensor_rules/register.h"

namespace dtensor_rules {

void register_cache(py::module_& module) {
  py::class_<CacheInfo>(module, "CacheInfo")
      .def_readonly("hits", &CacheInfo::hits)
      .def_readonly("misses", &CacheInfo::misses)
      .def_readonly("evictions", &CacheInfo::evictions)
      .def_readonly("size", &CacheInfo::size)
      .def_readonly("capacity", &CacheInfo::capacity);
  module.def("cache_info", [] { return plans().info(); });
  module.def("cache_clear", [] { plans().clear(); });
  module.def("set_cache_capacity", [](size_t capacity) { plans().set_capacity(capacity); });
}

}  // namespace dtensor_rules
