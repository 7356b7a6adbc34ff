#include "kernel_set.h"

#include <atomic>
#include <string_view>

namespace dist_rng {
namespace {

bool is_supported(const KernelSet& set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (&set == &avx512::kKernels) return has_avx2 && has_avx512;
  if (&set == &avx2::kKernels) return has_avx2;
#endif
  return &set == &baseline::kKernels;
}

// Best first.
constexpr const KernelSet* kSets[] = {
#if defined(__x86_64__)
    &avx512::kKernels,
    &avx2::kKernels,
#endif
    &baseline::kKernels,
};

const KernelSet* best() {
  for (const KernelSet* set : kSets) {
    if (is_supported(*set)) return set;
  }
  return &baseline::kKernels;
}

std::atomic<const KernelSet*>& in_use() {
  static std::atomic<const KernelSet*> set = best();
  return set;
}

}  // namespace

const KernelSet& kernel_set() { return *in_use().load(std::memory_order_relaxed); }

const KernelSet* use_kernel_set(std::string_view name) {
  for (const KernelSet* set : kSets) {
    if (name != set->name || !is_supported(*set)) continue;
    in_use().store(set, std::memory_order_relaxed);
    return set;
  }
  return nullptr;
}

}  // namespace dist_rng
