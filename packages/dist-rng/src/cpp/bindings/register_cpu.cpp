#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "../cpu/fill.h"
#include "../kernels/kernel_set.h"
#include "../mt19937/mt19937.h"

namespace py = pybind11;

namespace dist_rng {
namespace {

// Addresses come from Tensor.data_ptr(), which is an integer in Python.
using Address = std::uintptr_t;

TorchState& state_at(Address address) { return *reinterpret_cast<TorchState*>(address); }

void fill(Address state, Address data, Dtype dtype, const LocalGrid& grid,
          std::int64_t global_numel, const Kernel& kernel, const Arguments& arguments) {
  if (kernel.convert == nullptr) throw py::type_error("no kernel for this dtype");
  const py::gil_scoped_release unlocked;
  const FillTarget target{reinterpret_cast<void*>(data), dtype, grid, global_numel};
  fill_elements(state_at(state), target, kernel, arguments, nullptr, 0);
}

void uniform(Address state, Address data, Dtype dtype, const LocalGrid& grid,
             std::int64_t global_numel, double low, double high, bool fused, TorchRelease release) {
  Arguments arguments;
  arguments.low = low;
  arguments.high = high;
  arguments.fused = fused;
  arguments.release = release;
  fill(state, data, dtype, grid, global_numel, kernel_set().uniform(dtype, arguments), arguments);
}

void normal(Address state, Address data, Dtype dtype, const LocalGrid& grid,
            std::int64_t global_numel, double mean, double std, bool blocks, bool fused,
            TorchRelease release) {
  Arguments arguments;
  arguments.mean = mean;
  arguments.std = std;
  arguments.fused = fused;
  arguments.release = release;
  const Kernel pairs = kernel_set().normal_pairs(dtype, arguments);
  if (pairs.convert == nullptr) throw py::type_error("no kernel for this dtype");
  const py::gil_scoped_release unlocked;
  const FillTarget target{reinterpret_cast<void*>(data), dtype, grid, global_numel};
  if (blocks) {
    fill_normal_blocks(state_at(state), target, arguments);
  } else {
    fill_normal_pairs(state_at(state), target, pairs, arguments);
  }
}

void log_normal(Address state, Address data, Dtype dtype, const LocalGrid& grid,
                std::int64_t global_numel, double mean, double std, bool fused) {
  Arguments arguments;
  arguments.mean = mean;
  arguments.std = std;
  arguments.fused = fused;
  const Kernel pairs = kernel_set().log_normal_pairs(dtype, arguments);
  if (pairs.convert == nullptr) throw py::type_error("no kernel for this dtype");
  const py::gil_scoped_release unlocked;
  const FillTarget target{reinterpret_cast<void*>(data), dtype, grid, global_numel};
  fill_normal_pairs(state_at(state), target, pairs, arguments);
}

void bernoulli(Address state, Address data, Dtype dtype, const LocalGrid& grid,
               std::int64_t global_numel, double p) {
  Arguments arguments;
  arguments.p = p;
  fill(state, data, dtype, grid, global_numel, kernel_set().bernoulli(dtype, arguments), arguments);
}

bool bernoulli_tensor(Address state, Address data, Dtype dtype, const LocalGrid& grid,
                      std::int64_t global_numel, Address probabilities,
                      Dtype probabilities_dtype) {
  const Kernel kernel = kernel_set().bernoulli_tensor(dtype, probabilities_dtype);
  if (kernel.convert == nullptr) throw py::type_error("no kernel for this dtype");
  const py::gil_scoped_release unlocked;
  const FillTarget target{reinterpret_cast<void*>(data), dtype, grid, global_numel};
  return fill_elements(state_at(state), target, kernel, Arguments{},
                       reinterpret_cast<const void*>(probabilities), size_of(probabilities_dtype));
}

void exponential(Address state, Address data, Dtype dtype, const LocalGrid& grid,
                 std::int64_t global_numel, double rate) {
  Arguments arguments;
  arguments.rate = rate;
  fill(state, data, dtype, grid, global_numel, kernel_set().exponential(dtype, arguments),
       arguments);
}

void cauchy(Address state, Address data, Dtype dtype, const LocalGrid& grid,
            std::int64_t global_numel, double median, double sigma, bool fused) {
  Arguments arguments;
  arguments.median = median;
  arguments.sigma = sigma;
  arguments.fused = fused;
  fill(state, data, dtype, grid, global_numel, kernel_set().cauchy(dtype, arguments), arguments);
}

void geometric(Address state, Address data, Dtype dtype, const LocalGrid& grid,
               std::int64_t global_numel, double p) {
  Arguments arguments;
  arguments.p = p;
  fill(state, data, dtype, grid, global_numel, kernel_set().geometric(dtype, arguments), arguments);
}

void integers(Address state, Address data, Dtype dtype, const LocalGrid& grid,
              std::int64_t global_numel, std::uint64_t range, std::int64_t base) {
  if (range == 0) throw py::value_error("integers: expected a range > 0");
  Arguments arguments;
  arguments.range = range;
  arguments.base = base;
  fill(state, data, dtype, grid, global_numel, kernel_set().integers(dtype, arguments), arguments);
}

void all_integers(Address state, Address data, Dtype dtype, const LocalGrid& grid,
                  std::int64_t global_numel) {
  fill(state, data, dtype, grid, global_numel, kernel_set().all_integers(dtype, Arguments{}),
       Arguments{});
}

void skip(Address state, std::int64_t words) {
  if (words < 0) throw py::value_error("skip: expected words >= 0");
  const py::gil_scoped_release unlocked;
  Mt19937 engine(state_at(state));
  engine.skip(words);
  engine.store(state_at(state));
}

std::optional<std::int64_t> words_between(Address before, Address after, std::int64_t limit) {
  const py::gil_scoped_release unlocked;
  return Mt19937(state_at(before)).skip_to(Mt19937(state_at(after)), limit);
}

}  // namespace

void register_cpu(py::module_& module) {
  py::enum_<Dtype>(module, "Dtype")
      .value("float32", Dtype::kFloat32)
      .value("float64", Dtype::kFloat64)
      .value("bfloat16", Dtype::kBfloat16)
      .value("float16", Dtype::kFloat16)
      .value("uint8", Dtype::kUint8)
      .value("int8", Dtype::kInt8)
      .value("int16", Dtype::kInt16)
      .value("int32", Dtype::kInt32)
      .value("int64", Dtype::kInt64)
      .value("bool", Dtype::kBool)
      .value("uint16", Dtype::kUint16)
      .value("uint32", Dtype::kUint32)
      .value("uint64", Dtype::kUint64);
  py::enum_<TorchRelease>(module, "TorchRelease")
      .value("torch_2_11", TorchRelease::kTorch211)
      .value("torch_2_12", TorchRelease::kTorch212)
      .value("torch_2_13", TorchRelease::kTorch213);
  module.attr("STATE_BYTES") = sizeof(TorchState);
  module.def("instruction_set", [] { return std::string(kernel_set().name); });
  module.def("use_instruction_set", [](const std::string& name) {
    return use_kernel_set(name) != nullptr;
  });
  module.def("skip", &skip);
  module.def("words_between", &words_between);
  module.def("uniform", &uniform);
  module.def("normal", &normal);
  module.def("bernoulli", &bernoulli);
  module.def("bernoulli_tensor", &bernoulli_tensor);
  module.def("exponential", &exponential);
  module.def("cauchy", &cauchy);
  module.def("geometric", &geometric);
  module.def("log_normal", &log_normal);
  module.def("integers", &integers);
  module.def("all_integers", &all_integers);
}

}  // namespace dist_rng
