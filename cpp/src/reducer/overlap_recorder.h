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

/// Records the times of one backward after another for OverlapReport. Only report() waits. Not
/// thread safe, except for the callbacks of futures; the reducer serializes calls.
class OverlapRecorder final : public BackwardObserver {
 public:
  /// Begins a backward, whose times are recorded on the current stream of `device`. Drops the last
  /// backward if it is not completed.
  void began(std::optional<c10::Device> device, size_t parameters) override;
  void gradient_ready(size_t parameter) override;
  void launched(size_t bucket, const BucketMessage& message) override;
  void in_flight(size_t bucket, const Reduction& reduction) override;
  void awaiting(size_t bucket) override;
  void arrived(size_t bucket) override;
  void deferred() override;
  /// Ends the backward if deferred() was not called. report() then returns this backward.
  void completed() override;
  void dropped() override { current_.reset(); }

  /// The report of the last completed backward, without names; nullopt if there is none. On a
  /// device, the host waits until its streams have completed that backward.
  std::optional<OverlapReport> report() const;

 private:
  using Clock = std::chrono::steady_clock;

  /// A point in time, on the host and in a stream.
  struct Stamp {
    std::optional<Clock::time_point> host;
    std::optional<c10::Event> event;
  };

  /// Written when a future is completed, on any thread. The future shares ownership, so it may
  /// complete after the reducer and the recorder are destroyed.
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
