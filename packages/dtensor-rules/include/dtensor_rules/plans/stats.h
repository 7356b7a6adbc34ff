// What happened to the calls of one operator. Written under the GIL, but for `mode`, which is
// counted where no Python object has been touched yet.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "dtensor_rules/python.h"

namespace dtensor_rules {

// Why a call was left to torch; the names are those that stats() shows (reason_name).
enum class Reason : uint8_t {
  kNone,
  kMode,            // a torch-dispatch mode, functorch included, or InferenceMode is on
  kSubclass,        // an argument is a tensor subclass other than DTensor itself
  kLocalSubclass,   // a local tensor is one: asynchronous collectives, fake tensors
  kPlainTensor,     // a plain tensor that is no scalar beside a DTensor
  kNoDTensor,       // no argument is a DTensor
  kSymInt,          // a size is symbolic
  kNotInMesh,       // this rank is not part of the mesh
  kHandler,         // torch, or a library, has a handler of its own for the operator
  kRandom,          // random numbers are torch's, or dist-rng's
  kUnsupported,     // an argument or a result of a kind that no plan can hold
  kPropagation,     // torch's propagation raised; torch says so itself
  kExplicitOnly,    // torch's ExplicitRedistributionContext watches redistributions
  kChecking,        // the native call of a check (DTENSOR_RULES_CHECK)
  kCount,
};

const char* reason_name(Reason reason);
// The reason of that name. Raises std::invalid_argument for another.
Reason reason_of(const char* name);

struct OpStats {
  using Counter = std::atomic<uint64_t>;
  Counter rule = 0;   // hits of plans that a rule made
  Counter cache = 0;  // hits of the others
  Counter typed = 0;  // of both, those that a typed kernel ran
  Counter miss = 0;   // plans made
  std::array<Counter, static_cast<size_t>(Reason::kCount)> fallbacks = {};
  std::atomic<uint32_t> logged = 0;  // a bit per reason that was logged

  void clear() {
    rule = cache = typed = miss = 0;
    logged = 0;
    for (auto& count : fallbacks) {
      count = 0;
    }
  }
};

// A Python function of (name, reason) that logs why calls fall back to torch (logs.py), or None.
void set_fallback_logger(py::object function);

// Counts a call that falls back to torch; calls the logger, with the GIL, where it is the first of
// this operator, or method, and reason since OpStats::clear.
void count_fallback(OpStats& stats, const char* name, Reason reason);

// One more, by the holder of the GIL: no locked instruction.
inline void count(OpStats::Counter& counter) {
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

}  // namespace dtensor_rules
