// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/comm_hook.h>
#include <apex/parallel/reducer.h>
#include <support/fake_device.h>
#include <support/fake_group.h>
#include <support/toy_model.h>

// Times of a backward on a device, from events: without host waits and without races.

namespace apex::testing {
namespace {

using parallel::BucketOverlap;
using parallel::OverlapClock;
using parallel::OverlapReport;
using parallel::Reducer;
using parallel::ReducerOptions;
using Strings = std::vector<std::string>;

constexpr int kWorld = 2;

class FakeDeviceOverlap : public ::testing::Test {
 protected:
  FakeDeviceOverlap() { fake::detector().reset(); }
  ~FakeDeviceOverlap() override {
    fake::set_timed_events(false);
    EXPECT_EQ(fake::detector().errors(), Strings{});
  }

  ReducerOptions small_buckets() const {
    ReducerOptions options;
    options.limits.cap = 50;
    return options;
  }

  /// Runs one backward that records the plan and one that is timed, which must not make the host
  /// wait.
  OverlapReport report_of(Reducer& reducer) {
    reducer.record_overlap(true);
    const double began = now();
    int64_t waits = 0;
    for (int step = 0; step < 2; ++step) {
      const at::Tensor x = random_batch(12, 6, step).to(fake::device());
      waits = static_cast<int64_t>(fake::detector().host_waits().size());
      model_.zero_grad();
      reducer.prepare_for_forward();
      const at::Tensor y = model_.forward(x);
      reducer.watch_outputs({y});
      y.square().mean().backward();
    }
    const Strings all = fake::detector().host_waits();
    EXPECT_EQ(Strings(all.begin() + waits, all.end()), Strings{});
    const OverlapReport report = reducer.overlap_report().value();
    // The simulated device's clock runs faster than the host's.
    EXPECT_GT(report.began_s, began - 60);
    EXPECT_LE(report.began_s + report.backward_s, now());
    return report;
  }
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  void expect_in_order(const OverlapReport& report) {
    EXPECT_LE(0, report.last_gradient_s);
    EXPECT_LE(report.last_gradient_s, report.backward_s);
    for (const BucketOverlap& bucket : report.buckets) {
      EXPECT_LE(0, bucket.ready_s);
      EXPECT_LE(bucket.ready_s, bucket.launched_s);
      EXPECT_LE(bucket.launched_s, bucket.arrived_s);
    }
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_ = fake::make_mirror_group(kWorld, "wire");
  ToyModel model_ = ToyModel::mlp({6, 20, 20, 20, 3}, 1).clone(fake::device());
};

TEST_F(FakeDeviceOverlap, TimedEvents_TimesAreThoseOfTheStreams) {
  fake::set_timed_events(true);
  Reducer reducer(model_.parameters, {group_}, small_buckets());
  const OverlapReport report = report_of(reducer);
  EXPECT_EQ(report.clock, OverlapClock::kDevice);
  expect_in_order(report);
  ASSERT_GE(report.buckets.size(), 3u);
  for (const BucketOverlap& bucket : report.buckets) {
    // One operation takes a millisecond, so an event recorded before the all-reduce would have an
    // earlier time.
    EXPECT_GE(bucket.arrived_s, bucket.launched_s + 0.9e-3);
    EXPECT_LE(bucket.ready_s, report.last_gradient_s);
  }
  // The stream of backward waits for it much later.
  EXPECT_LT(report.buckets.front().arrived_s, report.last_gradient_s);
  EXPECT_EQ(report.buckets.front().exposed_s, 0);
  EXPECT_GT(report.hidden_s, 0);
}

TEST_F(FakeDeviceOverlap, TimedEvents_TheReportWaitsForThem) {
  fake::set_timed_events(true);
  Reducer reducer(model_.parameters, {group_}, small_buckets());
  const auto before = fake::detector().host_waits().size();
  report_of(reducer);
  const Strings waits = fake::detector().host_waits();
  ASSERT_GT(waits.size(), before);
  EXPECT_EQ(waits.back(), "synchronizing an event");
}

TEST_F(FakeDeviceOverlap, EventsWithoutTimes_TimesAreThoseOfTheHostAndSaySo) {
  Reducer reducer(model_.parameters, {group_}, small_buckets());
  const OverlapReport report = report_of(reducer);
  EXPECT_EQ(report.clock, OverlapClock::kHostOnly);
  expect_in_order(report);
  // Futures on a device complete immediately, which gives no information.
  for (const BucketOverlap& bucket : report.buckets) EXPECT_LE(bucket.awaited_s, bucket.arrived_s);
}

}  // namespace
}  // namespace apex::testing
