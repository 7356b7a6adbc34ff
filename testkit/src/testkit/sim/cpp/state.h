// The simulated accelerator: what its parts share.
//
// Its memory is the host's and its operators run on the host when they are called, so that results
// are the CPU's, bit for bit. Streams and events order nothing in time: they are recorded, for the
// race checker, which decides what a real device would have been free to reorder.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <functional>
#include <string>

namespace sim {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

// Devices of this process: SIM_DEVICES in the environment, 8 by default.
c10::DeviceIndex device_count() noexcept;
c10::DeviceIndex current_device() noexcept;
void set_device(c10::DeviceIndex index);

// Streams are numbers; 0 is the default stream of each device.
c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex index);

// What happened, in the order in which the host issued it.
enum class Kind : int {
  kRead,         // stream reads [first, last) of the storage
  kWrite,        // stream writes [first, last)
  kAllocate,     // storage, allocated on stream
  kFree,         // storage, by its allocating stream
  kRecordEvent,  // event on stream
  kWaitEvent,    // stream waits for event
  kSyncStream,   // the host waits for stream
  kSyncEvent,    // the host waits for event
  kSyncDevice,   // the host waits for all streams
  kUse,          // record_stream: storage is not reused before stream is done
};

struct Report {
  Kind kind;
  int device;
  int64_t stream;
  uint64_t id;     // address of the storage, or number of the event
  uint64_t first;  // addresses
  uint64_t last;
  std::string op;  // the operator, or what else has happened
};

using Listener = std::function<void(const Report&)>;

// At most one; an empty one ends the reports.
void listen(Listener listener);
bool is_listened_to() noexcept;
void report(const Report& what);

// Memory of the device.
struct Usage {
  int64_t allocated = 0;
  int64_t peak = 0;
  int64_t allocations = 0;
};
Usage usage(c10::DeviceIndex index);

// A tensor of the host on the memory of a simulated one, and a simulated one that takes the memory
// of a tensor of the host.
at::Tensor host_alias(const at::Tensor& tensor);
at::Tensor copy_to_device(const at::Tensor& host, c10::DeviceIndex index);

}  // namespace sim
