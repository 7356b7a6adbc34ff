// What Python sees.
#include "process_group.h"
#include "state.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &sim::device_count);
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_device);
  m.def("current_stream", [](c10::DeviceIndex index) { return sim::current_stream(index).id(); });
  m.def("new_stream", [](c10::DeviceIndex index) { return sim::new_stream(index).id(); });
  m.def("default_generator", [](c10::DeviceIndex index) {
    return at::detail::getPrivateUse1Hooks().getDefaultGenerator(index);
  });
  m.def("host_alias", &sim::host_alias);
  m.def("make_backend", &sim::make_backend);
  m.def("memory", [](c10::DeviceIndex index) {
    const auto use = sim::usage(index);
    return py::make_tuple(use.allocated, use.peak, use.allocations);
  });
  py::class_<sim::Report>(m, "Report")
      .def_property_readonly("kind", [](const sim::Report& r) { return static_cast<int>(r.kind); })
      .def_readonly("device", &sim::Report::device)
      .def_readonly("stream", &sim::Report::stream)
      .def_readonly("id", &sim::Report::id)
      .def_readonly("first", &sim::Report::first)
      .def_readonly("last", &sim::Report::last)
      .def_readonly("op", &sim::Report::op);
  m.def("listen", [](const py::object& listener) {
    if (listener.is_none()) {
      sim::listen({});
      return;
    }
    auto* callback = new py::object(listener);  // never freed: another thread may be in a call of it
    sim::listen([callback](const sim::Report& what) {
      const py::gil_scoped_acquire gil;
      const py::error_scope error;  // that is being raised, and frees tensors as it does
      (*callback)(what);
    });
  });
}
