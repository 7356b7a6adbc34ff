#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <vector>

#include "../kernels/kernel_set.h"
#include "../philox/fill.h"

namespace py = pybind11;

namespace dist_rng {
namespace {

using Address = std::uintptr_t;

// Takes each launch as {start, stop, threads, offset}, the offset relative to the generator's.
struct Stream {
  PhiloxStream stream;

  Stream(std::uint64_t seed, std::uint64_t offset, int unroll, int vector,
         const std::vector<std::array<std::int64_t, 4>>& launches)
      : stream{seed, {unroll, vector}, {}} {
    for (const auto& [start, stop, threads, relative_offset] : launches) {
      const auto count = (offset + static_cast<std::uint64_t>(relative_offset)) / 4;
      stream.launches.push_back({start, stop, threads, count});
    }
  }
};

void philox_fill(Address data, Dtype dtype, const LocalGrid& grid, const Stream& stream, int kind,
                 const PhiloxArguments& arguments, Address probabilities) {
  const PhiloxTarget target{reinterpret_cast<void*>(data), dtype, grid};
  bool known = false;
  {
    const py::gil_scoped_release unlocked;
    known = fill_philox(target, stream.stream, static_cast<PhiloxKind>(kind), arguments,
                        reinterpret_cast<const void*>(probabilities));
  }
  if (!known) throw py::type_error("philox_fill: no kernel for this dtype");
}

// The words of one call by `count` threads from `thread` on, for tests.
std::vector<std::array<std::uint32_t, 4>> calls(std::uint64_t seed, std::uint64_t call,
                                                std::uint64_t thread, std::int64_t count) {
  std::vector<std::uint32_t> storage(4 * static_cast<std::size_t>(count));
  std::uint32_t* const words[4] = {storage.data(), storage.data() + count,
                                   storage.data() + 2 * count, storage.data() + 3 * count};
  kernel_set().philox_calls(seed, call, thread, count, words);
  std::vector<std::array<std::uint32_t, 4>> made;
  for (std::int64_t i = 0; i < count; ++i) {
    made.push_back({words[0][i], words[1][i], words[2][i], words[3][i]});
  }
  return made;
}

}  // namespace

void register_philox(py::module_& module) {
  py::class_<Stream>(module, "PhiloxStream")
      .def(py::init<std::uint64_t, std::uint64_t, int, int,
                    const std::vector<std::array<std::int64_t, 4>>&>(),
           py::arg("seed"), py::arg("offset"), py::arg("unroll"), py::arg("vector"),
           py::arg("launches"));
  py::class_<PhiloxArguments>(module, "PhiloxArguments")
      .def(py::init<double, double, std::uint64_t, std::int64_t>(), py::arg("a"), py::arg("b"),
           py::arg("modulus"), py::arg("base"));
  module.def("philox_fill", &philox_fill, py::arg("data"), py::arg("dtype"), py::arg("grid"),
             py::arg("stream"), py::arg("kind"), py::arg("arguments"), py::arg("probabilities"));
  module.def("philox_calls", &calls, py::arg("seed"), py::arg("call"), py::arg("thread"),
             py::arg("count"));
}

}  // namespace dist_rng
