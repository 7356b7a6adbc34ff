#include "loops.h"

#include <atomic>

namespace fsdp {
namespace {

std::atomic<const Loops*>& in_use() {
  static std::atomic<const Loops*> chosen = all_loops().front();
  return chosen;
}

}  // namespace

std::vector<const Loops*> all_loops() {
  std::vector<const Loops*> found;
#if defined(FSDP_AVX2)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) found.push_back(&kAvx2);
#endif
  found.push_back(&kPortable);
  return found;
}

const Loops& loops() { return *in_use().load(std::memory_order_relaxed); }

bool use_loops(std::string_view name) {
  for (const Loops* each : all_loops()) {
    if (each->name != name) continue;
    in_use().store(each, std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace fsdp
