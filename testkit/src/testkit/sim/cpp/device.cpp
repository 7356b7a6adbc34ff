// Devices, streams and events, as torch's guards ask for them.
#include "state.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <vector>

namespace sim {

namespace {

thread_local c10::DeviceIndex current = 0;
thread_local std::vector<int64_t> streams;
std::atomic<int64_t> last_stream{0};
std::atomic<uint64_t> last_event{0};

std::mutex listener_mutex;
Listener listener;
std::atomic<bool> listened_to{false};

int64_t& stream_of(c10::DeviceIndex index) {
  if (streams.empty()) {
    streams.resize(static_cast<size_t>(device_count()), 0);
  }
  return streams.at(static_cast<size_t>(index));
}

c10::Stream stream_on(c10::DeviceIndex index, int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), number);
}

c10::DeviceIndex or_current(c10::DeviceIndex index) {
  return index < 0 ? current : index;
}

}  // namespace

c10::DeviceIndex device_count() noexcept {
  static const c10::DeviceIndex count = [] {
    const char* given = std::getenv("SIM_DEVICES");
    return static_cast<c10::DeviceIndex>(given ? std::atoi(given) : 8);
  }();
  return count;
}

c10::DeviceIndex current_device() noexcept {
  return current;
}

void set_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "sim: expected a device from 0 to ",
              device_count() - 1, ", got ", static_cast<int>(index),
              "; set SIM_DEVICES before the device is loaded");
  current = index;
}

c10::Stream current_stream(c10::DeviceIndex index) {
  index = or_current(index);
  return stream_on(index, stream_of(index));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device_index());
  stream_of(stream.device_index()) = stream.id();
  return before;
}

c10::Stream new_stream(c10::DeviceIndex index) {
  return stream_on(or_current(index), ++last_stream);
}

void listen(Listener other) {
  const std::lock_guard<std::mutex> lock(listener_mutex);
  listened_to = static_cast<bool>(other);
  listener = std::move(other);
}

bool is_listened_to() noexcept {
  return listened_to;
}

void report(const Report& what) {
  if (!listened_to) {
    return;
  }
  Listener called;
  {
    const std::lock_guard<std::mutex> lock(listener_mutex);
    called = listener;
  }
  if (called) {
    called(what);
  }
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kType, current);
    set_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_on(or_current(device.index()), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    report({Kind::kSyncStream, stream.device_index(), stream.id(), 0, 0, 0, "synchronize"});
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    report({Kind::kSyncDevice, or_current(index), 0, 0, 0, 0, "synchronize"});
  }

  // An event is a number, which its pointer is; each record makes a new one.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    const uint64_t number = ++last_event;
    *event = reinterpret_cast<void*>(number);
    report({Kind::kRecordEvent, stream.device_index(), stream.id(), number, 0, 0, "record"});
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto number = reinterpret_cast<uint64_t>(event);
    if (number != 0) {  // one that was never recorded holds nobody up
      report({Kind::kWaitEvent, stream.device_index(), stream.id(), number, 0, 0, "wait"});
    }
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    report({Kind::kSyncEvent, current, 0, reinterpret_cast<uint64_t>(event), 0, 0, "synchronize"});
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const auto address = reinterpret_cast<uint64_t>(data.get());
    report({Kind::kUse, stream.device_index(), stream.id(), address, 0, 0, "record_stream"});
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

}  // namespace sim
