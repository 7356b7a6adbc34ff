// A CUDA runtime that has no device; tests link it to what nvcc compiled, in the place of cudart.
//
// The host code of src/cuda and the code that nvcc makes of <<<>>> run unchanged. This runtime
// checks a launch as a device does, records it in `on_host`, and runs the kernel as a loop over
// blocks and threads. The kernels are compiled here a second time, by the host's compiler, with
// the element types and formulas of the host emulator.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>

#define DIST_RNG_ISA on_host
#undef __global__
#undef __launch_bounds__
#define __global__
#define __launch_bounds__(...)
static dim3 gridDim;
static uint3 blockIdx, threadIdx;

#include "../../src/cpp/philox/philox.h"

#include "../../src/cpp/kernels/element.h"
#include "../../src/cuda/kernels.cuh"

struct Configuration {
  dim3 grid, block;
  std::size_t shared_bytes;
  cudaStream_t stream;
};

// Settings that a test writes, and the last valid launch, which it reads. OnHost of
// test_cuda_kernels.py has the same layout.
struct OnHost {
  std::int32_t devices = 2;
  std::int32_t runs = 1;           // 0: launches are only checked and recorded
  cudaStream_t stream = nullptr;   // the one valid stream besides the default one
  std::int64_t launches = 0;
  const char* kernel = nullptr;    // the mangled name
  const void* function = nullptr;  // the host function that stands for the kernel
  Configuration launch{};
  std::int32_t device = 0;
};
extern "C" {
OnHost on_host;
}

namespace {

using namespace dist_rng::on_host;

using Run = void (*)(dim3 grid, dim3 block, void** arguments);
using Kernels = std::map<std::string, Run>;  // by the device's mangled name

template <typename Body>
void for_each(dim3 size, uint3& index, const Body& body) {
  for (index.z = 0; index.z < size.z; ++index.z) {
    for (index.y = 0; index.y < size.y; ++index.y) {
      for (index.x = 0; index.x < size.x; ++index.x) body();
    }
  }
}

template <auto kernel>
struct OnEveryThread;

// Reads the arguments with the types of the kernel's parameters.
template <typename... Parameters, void (*kernel)(Parameters...)>
struct OnEveryThread<kernel> {
  static void run(dim3 grid, dim3 block, void** arguments) {
    const auto thread = [&]<std::size_t... i>(std::index_sequence<i...>) {
      kernel(*static_cast<Parameters*>(arguments[i])...);
    };
    gridDim = grid;
    for_each(grid, blockIdx, [&] {
      for_each(block, threadIdx, [&] { thread(std::index_sequence_for<Parameters...>{}); });
    });
  }
};

// A kernel is found by its name, in which only the namespace DIST_RNG_ISA differs.
template <auto kernel>
void add_kernel(Kernels& made) {
  Dl_info symbol{};
  dladdr(reinterpret_cast<void*>(kernel), &symbol);
  std::string name = symbol.dli_sname;
  made[name.replace(name.find("7on_host"), 8, "6device")] = OnEveryThread<kernel>::run;
}

template <template <typename> typename Formula, typename... T>
void add_formula(Kernels& made) {
  (add_kernel<&boxes_kernel<T, Formula<T>>>(made), ...);
  (add_kernel<&strides_kernel<T, Formula<T>>>(made), ...);
  (add_kernel<&vectors_kernel<T, Formula<T>>>(made), ...);
}

template <template <typename> typename Formula>
void add_floating(Kernels& made) {
  add_formula<Formula, float, double, Bfloat16, Float16>(made);
}

template <template <typename> typename Formula>
void add_every(Kernels& made) {
  add_floating<Formula>(made);
  add_formula<Formula, std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t>(made);
}

Kernels all_kernels() {
  Kernels made;
  add_floating<UniformOf>(made);
  add_floating<NormalOf>(made);
  add_floating<ExponentialOf>(made);
  add_every<BernoulliOf>(made);
  add_every<BernoulliTensorOf>(made);
  add_every<Modulo32Of>(made);
  add_every<Modulo64Of>(made);
  add_formula<DropoutMaskOf, std::uint8_t>(made);
  return made;
}

struct Registered {
  const char* name;
  const void* function;
  Run run;
};

// By the address that host code launches; in a function, as static constructors of other files
// fill it.
std::map<const void*, Registered>& registered() {
  static std::map<const void*, Registered> made;
  return made;
}

Configuration pushed;
cudaError_t last_error = cudaSuccess;
int current_device = 0;

// An error stays until cudaGetLastError reads it, whatever succeeds in between.
cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

bool within(dim3 size, unsigned x, unsigned y, unsigned z) {
  return 1 <= size.x && size.x <= x && 1 <= size.y && size.y <= y && 1 <= size.z && size.z <= z;
}

// The limits of compute capability 8.0 to 10.0: "Technical Specifications per Compute Capability"
// in the CUDA C++ Programming Guide. The error codes are cudart's.
cudaError_t checked(const Configuration& launch) {
  const std::uint64_t threads = std::uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  if (!within(launch.grid, (1u << 31) - 1, 65535, 65535) ||
      !within(launch.block, 1024, 1024, 64) || threads > 1024) {
    return cudaErrorInvalidConfiguration;
  }
  if (threads > kBlock) return cudaErrorInvalidValue;  // __launch_bounds__ of all kernels
  if (launch.shared_bytes > 48 * 1024) return cudaErrorInvalidValue;
  if (launch.stream != nullptr && launch.stream != on_host.stream) {
    return cudaErrorInvalidResourceHandle;
  }
  return cudaSuccess;
}

cudaError_t launched(const Registered* kernel, const Configuration& launch, void** arguments) {
  if (kernel == nullptr) return returned(cudaErrorInvalidDeviceFunction);
  if (const cudaError_t error = checked(launch)) return returned(error);
  ++on_host.launches;
  on_host.kernel = kernel->name;
  on_host.function = kernel->function;
  on_host.launch = launch;
  on_host.device = current_device;
  if (on_host.runs) kernel->run(launch.grid, launch.block, arguments);
  return cudaSuccess;
}

}  // namespace

// What nvcc's host code calls; crt/host_runtime.h declares it, but only for nvcc.
extern "C" {

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  static const Kernels compiled = all_kernels();
  const auto found = compiled.find(name);
  if (found == compiled.end()) {
    std::fprintf(stderr, "cuda_runtime_on_host.cpp: add_formula has no kernel %s\n", name);
    std::abort();
  }
  registered()[host_function] = {name, host_function, found->second};
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared_bytes,
                                     cudaStream_t stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared_bytes,
                                       void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared_bytes = pushed.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}

// nvcc 13 looks a kernel up once and launches its handle; nvcc 12 launches its address.
cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* function) {
  const auto found = registered().find(function);
  *handle = found == registered().end() ? nullptr : reinterpret_cast<cudaKernel_t>(&found->second);
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t handle, dim3 grid, dim3 block, void** arguments,
                               std::size_t shared_bytes, cudaStream_t stream) {
  return launched(reinterpret_cast<const Registered*>(handle),
                  {grid, block, shared_bytes, stream}, arguments);
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             std::size_t shared_bytes, cudaStream_t stream) {
  cudaKernel_t handle = nullptr;
  __cudaGetKernel(&handle, function);
  return __cudaLaunchKernel(handle, grid, block, arguments, shared_bytes, stream);
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= on_host.devices) return returned(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  static const std::map<cudaError_t, const char*> texts{
      {cudaErrorInvalidValue, "invalid argument"},
      {cudaErrorInvalidConfiguration, "invalid configuration argument"},
      {cudaErrorInvalidDeviceFunction, "invalid device function"},
      {cudaErrorInvalidDevice, "invalid device ordinal"},
      {cudaErrorInvalidResourceHandle, "invalid resource handle"},
  };
  const auto found = texts.find(error);
  return found == texts.end() ? "unrecognized error code" : found->second;
}

}  // extern "C"
