// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/overlap_recorder.h"

#include <algorithm>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace apex::parallel::detail {

namespace {

int64_t bytes_of(const at::Tensor& message) {
  if (message.layout() != at::kSparse) return static_cast<int64_t>(message.nbytes());
  return static_cast<int64_t>(message._indices().nbytes() + message._values().nbytes());
}

}  // namespace

// Note [When a bucket has arrived]
//
// The wait for a bucket begins when backward has nothing left to compute, and most buckets have
// completed long before. So the time of completion is taken from the future of the Work. On the CPU
// that is the time when the backend's thread completes the future. On a device the future is
// complete as soon as the collective is enqueued. Its callback runs on a stream of torch's pool
// that waits for the collective's stream. An event recorded there has the time of completion, and
// neither the host nor the stream of backward waits.
//
// If a Work has no future, or its callback is late, the end of the wait is used instead (on a
// device, the time when the waiting stream continues). It is never before the completion.

void OverlapRecorder::began(std::optional<c10::Device> device, size_t parameters) {
  current_ = std::make_unique<Backward>();
  current_->device = device;
  current_->gradients.resize(parameters);
  current_->begin = now(device);
}

OverlapRecorder::Stamp OverlapRecorder::now(const std::optional<c10::Device>& device) noexcept {
  Stamp stamp;
  stamp.host = Clock::now();
  if (!device || device->is_cpu()) return stamp;
  try {
    c10::Event event(device->type(), c10::EventFlag::BACKEND_DEFAULT);
    event.record(c10::impl::VirtualGuardImpl(device->type()).getStream(*device));
    stamp.event = std::move(event);
  } catch (const std::exception&) {
    // The device has no timed events. report() detects that they are missing.
  }
  return stamp;
}

void OverlapRecorder::gradient_ready(size_t parameter) {
  if (current_) current_->gradients[parameter] = now(current_->device);
}

void OverlapRecorder::launched(size_t bucket, const BucketMessage& message) {
  if (!current_) return;
  if (current_->buckets.size() <= bucket) current_->buckets.resize(bucket + 1);
  BucketStamps& stamps = current_->buckets[bucket];
  for (const BucketMessage::Slot& slot : message.slots())
    stamps.parameters.push_back(slot.parameter);
  stamps.bytes = bytes_of(message.tensor());
  stamps.launched = now(current_->device);
}

void OverlapRecorder::in_flight(size_t bucket, const Reduction& reduction) {
  // With several devices neither clock is usable: the callback of a device other than the CPU runs
  // immediately.
  if (!current_ || bucket >= current_->buckets.size()) return;
  current_->buckets[bucket].shared_memory = reduction.traits().shares_memory;
  current_->buckets[bucket].by_host = reduction.traits().across_hosts;
  auto arrival = std::make_shared<Arrival>();
  const FuturePtr future = reduction.future();
  if (!future) {
    if (reduction.traits().has_peers) return;  // the time is unknown
    arrival->stamp = now(current_->device);
    arrival->set.store(true, std::memory_order_release);
    current_->buckets[bucket].arrival = std::move(arrival);
    return;
  }
  if (!current_->device) return;
  current_->buckets[bucket].arrival = arrival;
  const c10::Device device = *current_->device;
  const bool on_device = !device.is_cpu();
  future->addCallback(
      [arrival = std::move(arrival), device](c10::ivalue::Future&) {
        arrival->stamp = now(device);
        arrival->set.store(true, std::memory_order_release);
      },
      /*uses_future=*/on_device);
}

void OverlapRecorder::awaiting(size_t bucket) {
  if (!current_ || bucket >= current_->buckets.size()) return;
  current_->buckets[bucket].awaiting = now(current_->device);
}

void OverlapRecorder::arrived(size_t bucket) {
  if (!current_ || bucket >= current_->buckets.size()) return;
  current_->buckets[bucket].arrived = now(current_->device);
}

void OverlapRecorder::deferred() {
  if (current_) current_->ended = now(current_->device);
}

void OverlapRecorder::completed() {
  if (!current_) return;
  if (!current_->ended.host) deferred();
  last_ = std::move(current_);
}

double OverlapRecorder::seconds_to(const Backward& backward, const Stamp& stamp, bool by_device) {
  if (!by_device) return std::chrono::duration<double>(*stamp.host - *backward.begin.host).count();
  TORCH_CHECK(stamp.event, "an event was not recorded");
  stamp.event->synchronize();
  return backward.begin.event->elapsedTime(*stamp.event) * 1e-3;
}

/// A device has no common clock with the host. So this records an event now, and reads the host's
/// clock when the device reaches the event.
double OverlapRecorder::began_at(const Backward& backward, bool by_device) {
  const auto seconds = [](Clock::time_point time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  };
  if (!by_device) return seconds(*backward.begin.host);
  const double since = seconds_to(backward, now(backward.device), true);
  return seconds(Clock::now()) - since;
}

bool OverlapRecorder::timed_by_device(const Backward& backward) {
  if (!backward.begin.event || !backward.ended.event) return false;
  backward.begin.event->synchronize();
  backward.ended.event->synchronize();
  try {
    backward.begin.event->elapsedTime(*backward.ended.event);
    return true;
  } catch (const c10::Error&) {
    return false;  // its events have no times
  }
}

OverlapReport OverlapRecorder::report_of(const Backward& backward, OverlapClock clock) {
  const bool by_device = clock == OverlapClock::kDevice;
  const auto seconds = [&](const Stamp& stamp) { return seconds_to(backward, stamp, by_device); };
  double last_gradient_s = 0;
  std::vector<BucketOverlap> buckets;
  for (const BucketStamps& stamps : backward.buckets) {
    BucketOverlap bucket;
    bucket.parameters = stamps.parameters;
    bucket.bytes = stamps.bytes;
    bucket.shared_memory = stamps.shared_memory;
    bucket.by_host = stamps.by_host;
    bucket.launched_s = seconds(stamps.launched);
    // A bucket with a missing gradient, or with used-parameter masks, is ready only when it is
    // launched.
    bool has_all = !stamps.parameters.empty();
    for (const int64_t parameter : stamps.parameters) {
      const Stamp& gradient = backward.gradients[parameter];
      has_all = has_all && gradient.host;
      if (gradient.host) bucket.ready_s = std::max(bucket.ready_s, seconds(gradient));
    }
    last_gradient_s = std::max(last_gradient_s, bucket.ready_s);
    if (!has_all) bucket.ready_s = bucket.launched_s;
    bucket.awaited_s = seconds(stamps.awaiting);
    bucket.arrived_s = seconds(stamps.arrived);
    // The host's clock does not show when a device completes a future.
    if (clock != OverlapClock::kHostOnly && stamps.arrival &&
        stamps.arrival->set.load(std::memory_order_acquire)) {
      bucket.arrived_s = std::min(bucket.arrived_s, seconds(stamps.arrival->stamp));
    }
    // Events of different streams are ordered only up to the resolution of their clock.
    bucket.ready_s = std::min(bucket.ready_s, bucket.launched_s);
    bucket.arrived_s = std::max(bucket.arrived_s, bucket.launched_s);
    buckets.push_back(std::move(bucket));
  }
  OverlapReport report =
      summarize_overlap(last_gradient_s, std::max(last_gradient_s, seconds(backward.ended)),
                        std::move(buckets), clock);
  report.began_s = began_at(backward, by_device);
  return report;
}

std::optional<OverlapReport> OverlapRecorder::report() const {
  if (!last_) return std::nullopt;
  OverlapClock clock = OverlapClock::kHostOnly;
  if (last_->device && last_->device->is_cpu()) {
    clock = OverlapClock::kHost;
  } else if (timed_by_device(*last_)) {
    clock = OverlapClock::kDevice;
  }
  return report_of(*last_, clock);
}

}  // namespace apex::parallel::detail
