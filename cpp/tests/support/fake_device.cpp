// SPDX-License-Identifier: BSD-3-Clause
#include <support/fake_device.h>

#include <support/fake_capture.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace apex::testing::fake {
namespace {

using Block = RaceDetector::Block;

/// Stored with each storage: its block in the detector.
struct Memory {
  Block block;
  std::shared_ptr<void> data;
  size_t bytes;
};

/// All allocated memory, by first address.
class Memories {
 public:
  static Memories& instance() {
    static Memories* const memories =
        new Memories;  // never destroyed: static tensors are freed later
    return *memories;
  }

  void add(const Memory& memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    memories_.emplace(static_cast<const char*>(memory.data.get()), memory);
  }
  void remove(const Memory& memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    memories_.erase(static_cast<const char*>(memory.data.get()));
  }
  std::optional<Memory> find(const Region& region) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* const address = static_cast<const char*>(region.data);
    auto after = memories_.upper_bound(address);
    if (after == memories_.begin()) return std::nullopt;
    const auto& [begin, memory] = *--after;
    if (address + region.bytes > begin + memory.bytes) return std::nullopt;
    return memory;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const char*, Memory> memories_;
};

void free_memory(void* context) {
  const std::unique_ptr<Memory> memory(static_cast<Memory*>(context));
  Memories::instance().remove(*memory);
  detector().free(memory->block);
}

const Memory* memory_of(const c10::DataPtr& pointer) {
  if (pointer.get_deleter() != &free_memory) return nullptr;
  return static_cast<const Memory*>(pointer.get_context());
}

/// Each thread starts on stream 0, as on other devices.
thread_local c10::StreamId current = 0;

std::atomic<size_t> largest_block{std::numeric_limits<size_t>::max()};

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }

class FakeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes > largest_block.load())
      throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                  "the fake device has no memory left");
    // An empty tensor has a unique address as well. Addresses are multiples of 16, as on other
    // devices.
    void* const data = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    if (data == nullptr) throw std::bad_alloc();
    auto memory = std::make_unique<Memory>(
        Memory{detector().allocate(current), std::shared_ptr<void>(data, &std::free), bytes});
    Memories::instance().add(*memory);
    return {data, memory.release(), &free_memory, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

void host_waits(const Mark& mark, const std::string& what) {
  Capture::host(what, mark.capture);
  detector().host_waits(mark.clock, what);
}

/// Streams are numbers, and an event is a recorded mark.
class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return current_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return new_stream("new"); }
  // A pool would order its users at random.
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return new_stream("pool");
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark;
    *static_cast<Mark*>(*event) = fake::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) fake::wait(stream, *static_cast<Mark*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query(*static_cast<Mark*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_waits(*static_cast<Mark*>(event), "synchronizing an event");
  }
  bool queryStream(const c10::Stream& stream) const override { return query(fake::record(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(fake::record(stream), "synchronizing a stream");
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    const Memory* const memory = memory_of(pointer);
    if (memory != nullptr) detector().used_on(memory->block, stream.id());
  }
};

/// Reports that the device exists; autograd checks this before it uses its streams.
class FakeHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  // All memory is host memory, so non-blocking copies need no pinned memory.
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(at::kCPU); }
};

// Registered before any tensor, for the life of the program: torch keeps these pointers.
const bool registered = [] {
  c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, new FakeGuard);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, new FakeAllocator);
  at::RegisterPrivateUse1HooksInterface(new FakeHooks);
  c10::register_privateuse1_backend("fake");
  return true;
}();

}  // namespace

c10::Device device() { return {c10::DeviceType::PrivateUse1, 0}; }

c10::Stream current_stream() { return stream_of(current); }

c10::Stream new_stream(const std::string& name) { return stream_of(detector().new_stream(name)); }

void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(earlier);
  event.block(later);
}

Mark record(const c10::Stream& stream) {
  return {detector().record(stream.id()), Capture::of(stream.id())};
}

void wait(const c10::Stream& stream, const Mark& mark) {
  Capture::wait(stream.id(), mark.capture);
  detector().wait(stream.id(), mark.clock);
}

bool query(const Mark& mark) {
  Capture::host("whether an event is over", mark.capture);
  return detector().host_knows(mark.clock);
}

void set_largest_block(size_t bytes) { largest_block.store(bytes); }

void* allocate_for_good(size_t bytes) {
  c10::DataPtr pointer = c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(bytes);
  void* const data = pointer.get();
  (void)pointer.release_context();
  return data;
}

RaceDetector& detector() {
  // Never destroyed: static tensors are freed later.
  static RaceDetector* const instance = [] {
    auto* made = new RaceDetector;
    made->new_stream("default");
    return made;
  }();
  return *instance;
}

namespace {

/// Looked up by address, since another storage may use the same memory.
std::optional<Memory> memory_behind(const at::Tensor& tensor) {
  return Memories::instance().find({tensor.storage().data(), tensor.storage().nbytes(), false});
}

}  // namespace

std::vector<RaceDetector::Access> access(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.is_privateuseone()) return {};
  const std::optional<Memory> memory = memory_behind(tensor);
  if (!memory) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const size_t begin = static_cast<size_t>(tensor.storage_offset()) * tensor.element_size();
  const size_t end = begin + static_cast<size_t>(last + 1) * tensor.element_size();
  return {{memory->block, begin, end, writes}};
}

void operate(const c10::Stream& stream, const std::string& what,
             const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes,
             const std::function<void()>& compute) {
  std::vector<RaceDetector::Access> accesses;
  const auto add = [&](const std::vector<at::Tensor>& tensors, bool are_written) {
    for (const at::Tensor& tensor : tensors) {
      const auto more = access(tensor, are_written);
      accesses.insert(accesses.end(), more.begin(), more.end());
    }
  };
  add(reads, false);
  add(writes, true);
  detector().operate(stream.id(), what, accesses);
  compute();
  Capture::operate(stream.id(), what, accesses, [reads, writes, compute] { compute(); });
}

void operate(const c10::Stream& stream, const std::string& what, const std::vector<Region>& regions,
             const std::function<void()>& compute) {
  std::vector<RaceDetector::Access> accesses;
  std::vector<Memory> kept;
  for (const Region& region : regions) {
    const std::optional<Memory> memory = Memories::instance().find(region);
    if (!memory) {
      detector().fail(what + " uses memory that is not the device's");
      continue;
    }
    const auto begin = static_cast<size_t>(static_cast<const char*>(region.data) -
                                           static_cast<const char*>(memory->data.get()));
    accesses.push_back({memory->block, begin, begin + region.bytes, region.writes});
    kept.push_back(*memory);
  }
  detector().operate(stream.id(), what, accesses);
  compute();
  Capture::operate(stream.id(), what, accesses, [kept, compute] { compute(); });
}

void used_on(const at::Tensor& tensor, const c10::Stream& stream) {
  const std::optional<Memory> memory = memory_behind(tensor);
  if (memory) detector().used_on(memory->block, stream.id());
}

}  // namespace apex::testing::fake
