// The Python module fsdp.optim._core; its signatures are documented in _core.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "code_book.h"
#include "kernels.h"
#include "step.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// Addresses come from Tensor.data_ptr(), which is an integer in Python; 0 means no tensor.
using Address = std::uintptr_t;
using Addresses = std::tuple<Address, Address, Address, Address, Address, Address, std::int64_t>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

std::vector<std::size_t> step_at(const std::vector<Addresses>& params, const Coefficients& c,
                                 std::int64_t block_size, const CodeBookTable& first,
                                 const CodeBookTable& second, int threads) {
  if (block_size < 1) throw py::value_error("step: expected block_size to be at least 1");
  std::vector<LocalParam> local_params;
  local_params.reserve(params.size());
  for (const auto& [param, grad, m, m_scales, v, v_scales, count] : params) {
    local_params.push_back({at<float>(param), at<const float>(grad), at<void>(m),
                            at<float>(m_scales), at<void>(v), at<float>(v_scales), count});
  }
  const py::gil_scoped_release unlocked;
  return step(local_params, c, block_size, first, second, threads);
}

std::vector<std::string_view> kernel_names() {
  std::vector<std::string_view> names;
  for (const Kernels* each : available_kernels()) names.push_back(each->name);
  return names;
}

void select_or_throw(std::string_view name) {
  if (select_kernels(name)) return;
  std::string text = "select_kernels: expected one of";
  for (const std::string_view each : kernel_names()) text.append(" '").append(each).append("'");
  throw py::value_error(text.append(", got '").append(name).append("'"));
}

}  // namespace
}  // namespace fsdp

PYBIND11_MODULE(_core, module) {
  using namespace fsdp;
  module.doc() = "Compiled step of fsdp.optim.Adam8bit; see _core.pyi.";
  py::class_<CodeBookTable>(module, "CodeBookTable")
      .def(py::init<std::vector<float>, const std::vector<float>&, int>(), py::arg("values"),
           py::arg("boundaries"), py::arg("zero"));
  py::class_<Coefficients>(module, "Coefficients")
      .def(py::init<float, float, float, float, float, float, float, float, float>(),
           py::arg("beta1"), py::arg("one_minus_beta1"), py::arg("beta2"),
           py::arg("one_minus_beta2"), py::arg("step_size"),
           py::arg("inv_bias_correction2_sqrt"), py::arg("eps"), py::arg("param_decay"),
           py::arg("l2_factor"));
  module.def("step", &step_at, py::arg("params"), py::arg("coefficients"), py::arg("block_size"),
             py::arg("first"), py::arg("second"), py::arg("threads"));
  module.def("available_kernels", &kernel_names);
  module.def("active_kernels", [] { return active_kernels().name; });
  module.def("select_kernels", &select_or_throw, py::arg("name"));
}
