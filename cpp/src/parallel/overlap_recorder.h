#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <apex/parallel/overlap_report.h>

namespace apex::parallel::detail {

/// Takes the times of one backward after another for OverlapReport. Nothing here waits, but report().
/// Not thread safe, but for what futures call back; the reducer serializes calls.
class OverlapRecorder {
 public:
  /// A backward begins on the current stream of `device`; nullopt: gradients are on several devices. What
  /// the last one has not completed is forgotten.
  void begin(std::optional<c10::Device> device, size_t parameters);
  /// The gradient of a parameter was computed; the last call counts.
  void gradient(size_t parameter);
  /// A bucket is packed, and is handed over now.
  void launched(size_t bucket, std::vector<int64_t> parameters, int64_t bytes);
  /// What tells when it arrives; either may be null. A later call for the same bucket replaces the first.
  void in_flight(size_t bucket, const c10::intrusive_ptr<c10d::Work>& work);
  void in_flight(size_t bucket, const c10::intrusive_ptr<c10::ivalue::Future>& future);
  /// With one rank nothing travels.
  void arrived_at_once(size_t bucket);
  /// Somebody waits for it from now on; and has it.
  void awaiting(size_t bucket);
  void arrived(size_t bucket);
  /// Backward returns without waiting for the buckets.
  void ended();
  /// All gradients are complete: if ended() was not called, backward ends now. report() is of this backward
  /// from now on.
  void completed();
  /// This backward failed.
  void drop() { current_.reset(); }

  /// Of the last backward that was completed, without names; nullopt if none was. On a device, the host
  /// waits until its streams are through with it.
  std::optional<OverlapReport> report() const;

 private:
  using Clock = std::chrono::steady_clock;

  /// A moment: on the host, and in a stream.
  struct Stamp {
    std::optional<Clock::time_point> host;
    std::optional<c10::Event> event;
  };

  /// Where a future writes when it is completed, in whatever thread. Shared with it alone, so that it may
  /// be completed when reducer and recorder are gone.
  struct Arrival {
    Stamp stamp;
    std::atomic<bool> set{false};
  };

  struct BucketStamps {
    std::vector<int64_t> parameters;
    int64_t bytes = 0;
    Stamp launched;
    Stamp awaiting;
    Stamp arrived;                     ///< the wait for it returned
    std::shared_ptr<Arrival> arrival;  ///< its future was completed
  };

  struct Backward {
    std::optional<c10::Device> device;
    Stamp begin;
    Stamp ended;
    std::vector<Stamp> gradients;  ///< by parameter
    std::vector<BucketStamps> buckets;
  };

  static Stamp now(const std::optional<c10::Device>& device) noexcept;
  static bool timed_by_device(const Backward& backward);
  static double seconds_to(const Backward& backward, const Stamp& stamp, bool by_device);
  static OverlapReport report_of(const Backward& backward, OverlapClock clock);

  std::unique_ptr<Backward> current_;
  std::unique_ptr<Backward> last_;
};

}  // namespace apex::parallel::detail
