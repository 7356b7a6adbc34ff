#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "register.h"
#include "step.h"

namespace py = pybind11;

namespace fsdp {
namespace {

// Addresses come from Tensor.data_ptr(), which is an integer in Python; 0 is none.
using Address = std::uintptr_t;
using Addresses = std::tuple<Address, Address, Address, Address, Address, Address, std::int64_t>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

std::vector<std::size_t> step_at(const std::vector<Addresses>& given, const Coefficients& c,
                                 std::int64_t block_size, const Book& first, const Book& second,
                                 int threads) {
  if (block_size < 1) throw py::value_error("step: block_size must be at least 1");
  std::vector<Job> jobs;
  jobs.reserve(given.size());
  for (const auto& [param, grad, m, m_scales, v, v_scales, count] : given) {
    jobs.push_back({at<float>(param), at<const float>(grad), at<void>(m), at<float>(m_scales),
                    at<void>(v), at<float>(v_scales), count});
  }
  const py::gil_scoped_release unlocked;
  return step(jobs, c, block_size, first, second, threads);
}

}  // namespace

void register_step(py::module_& module) {
  py::class_<Book>(module, "Book")
      .def(py::init<std::vector<float>, const std::vector<float>&, int>(), py::arg("values"),
           py::arg("boundaries"), py::arg("zero"));
  py::class_<Coefficients>(module, "Coefficients")
      .def(py::init<float, float, float, float, float, float, float, float, float>(),
           py::arg("beta1"), py::arg("rest1"), py::arg("beta2"), py::arg("rest2"),
           py::arg("size"), py::arg("root"), py::arg("eps"), py::arg("decay"),
           py::arg("coupled"));
  module.def("step", &step_at, py::arg("jobs"), py::arg("coefficients"), py::arg("block_size"),
             py::arg("first"), py::arg("second"), py::arg("threads"));
}

}  // namespace fsdp
