// The process group of the simulated device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// A backend whose data `host`, a backend for the CPU, moves.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Backend>& host,
                                               int rank, int size);

}  // namespace sim
