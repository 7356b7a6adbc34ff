// The allocators of the device and of pinned memory, and torch's hooks.
#include "state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace sim {

namespace {

constexpr size_t kAlignment = 64;

struct Block {
  size_t bytes;
  c10::DeviceIndex device;
  int64_t stream;
};

std::mutex mutex;
std::unordered_map<void*, Block> blocks;
std::unordered_map<const void*, size_t> pinned;
std::array<Usage, 64> usages;

void* aligned(size_t bytes) {
  void* memory = nullptr;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  TORCH_CHECK(posix_memalign(&memory, kAlignment, rounded) == 0, "sim: expected ", bytes,
              " bytes of host memory, got none");
  return memory;
}

void free_block(void* memory) {
  Block block{};
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = blocks.find(memory);
    if (found == blocks.end()) {
      return;
    }
    block = found->second;
    blocks.erase(found);
    usages.at(static_cast<size_t>(block.device)).allocated -= static_cast<int64_t>(block.bytes);
  }
  const auto address = reinterpret_cast<uint64_t>(memory);
  report({Kind::kFree, block.device, block.stream, address, address, address + block.bytes, "free"});
  std::free(memory);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    void* memory = bytes == 0 ? nullptr : aligned(bytes);
    if (memory != nullptr) {
      const auto stream = current_stream(device).id();
      {
        const std::lock_guard<std::mutex> lock(mutex);
        blocks[memory] = {bytes, device, stream};
        Usage& use = usages.at(static_cast<size_t>(device));
        use.allocated += static_cast<int64_t>(bytes);
        use.peak = std::max(use.peak, use.allocated);
        ++use.allocations;
      }
      const auto address = reinterpret_cast<uint64_t>(memory);
      report({Kind::kAllocate, device, stream, address, address, address + bytes, "allocate"});
    }
    return {memory, memory, &free_block, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const auto address = reinterpret_cast<uint64_t>(data.get());
    report({Kind::kUse, stream.device_index(), stream.id(), address, 0, 0, "record_stream"});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Usage use = usage(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*each)[0].current = use.allocated;
      (*each)[0].peak = use.peak;
    }
    stats.allocation[0].allocated = use.allocations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    const std::lock_guard<std::mutex> lock(mutex);
    usages.at(static_cast<size_t>(index)).allocations = 0;
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    const std::lock_guard<std::mutex> lock(mutex);
    Usage& use = usages.at(static_cast<size_t>(index));
    use.peak = use.allocated;
  }
};

void free_pinned(void* memory) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(memory);
  }
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes == 0 ? nullptr : aligned(bytes);
    if (memory != nullptr) {
      const std::lock_guard<std::mutex> lock(mutex);
      pinned[memory] = bytes;
    }
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Allocator allocator;
PinnedAllocator pinned_allocator;

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(kType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current_device();
    set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::vector<at::Generator> all = [] {
      std::vector<at::Generator> made;
      for (c10::DeviceIndex each = 0; each < device_count(); ++each) {
        made.push_back(at::make_generator<Generator>(each));
        made.back().seed();
      }
      return made;
    }();
    return all.at(static_cast<size_t>(index < 0 ? current_device() : index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device() : index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = blocks.find(data);
    return {kType, found == blocks.end() ? current_device() : found->second.device};
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [first, bytes] : pinned) {
      const auto* begin = static_cast<const char*>(first);
      if (data >= begin && data < begin + bytes) {
        return true;
      }
    }
    return false;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceIndex before = exchangeDevice(storage.device().index());
    c10::DataPtr data = allocator.allocate(bytes);
    if (const size_t saved = std::min(bytes, storage.nbytes()); saved > 0) {
      std::memcpy(data.get(), storage.data(), saved);
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    set_device(before);
  }
};

Hooks hooks;

const bool registered = [] {
  c10::SetAllocator(kType, &allocator, 1);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

Usage usage(c10::DeviceIndex index) {
  const std::lock_guard<std::mutex> lock(mutex);
  return usages.at(static_cast<size_t>(index < 0 ? current_device() : index));
}

}  // namespace sim
