// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <apex/parallel/overlap_report.h>

#include "reducer/observer.h"

namespace apex::parallel::detail {

/// Takes the times of one backward after another for OverlapReport. Nothing here waits, but
/// report(). Not thread safe, but for what futures call back; the reducer serializes calls.
class OverlapRecorder final : public BackwardObserver {
 public:
  /// Times are taken on the current stream of `device`. What the last backward has not completed is
  /// forgotten.
  void began(std::optional<c10::Device> device, size_t parameters) override;
  void gradient_ready(size_t parameter) override;
  void launched(size_t bucket, const BucketMessage& message) override;
  void in_flight(size_t bucket, const Reduction& reduction) override;
  void awaiting(size_t bucket) override;
  void arrived(size_t bucket) override;
  void deferred() override;
  /// If deferred() was not called, backward ends now. report() is of this backward from now on.
  void completed() override;
  void dropped() override { current_.reset(); }

  /// Of the last backward that was completed, without names; nullopt if none was. On a device, the
  /// host waits until its streams are through with it.
  std::optional<OverlapReport> report() const;

 private:
  using Clock = std::chrono::steady_clock;

  /// A moment: on the host, and in a stream.
  struct Stamp {
    std::optional<Clock::time_point> host;
    std::optional<c10::Event> event;
  };

  /// Where a future writes when it is completed, in whatever thread. Shared with it alone, so that
  /// it may be completed when reducer and recorder are gone.
  struct Arrival {
    Stamp stamp;
    std::atomic<bool> set{false};
  };

  struct BucketStamps {
    std::vector<int64_t> parameters;
    int64_t bytes = 0;
    bool shared_memory = false;
    bool by_host = false;
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
  static double began_at(const Backward& backward, bool by_device);
  static OverlapReport report_of(const Backward& backward, OverlapClock clock);

  std::unique_ptr<Backward> current_;
  std::unique_ptr<Backward> last_;
};

}  // namespace apex::parallel::detail
