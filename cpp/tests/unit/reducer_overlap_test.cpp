// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <apex/error.h>
#include <apex/parallel/reducer.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Times of a backward and its buckets, with ranks as threads. Compares the order of events that the
// tests enforce, never durations.

namespace apex::parallel {
namespace {

using apex::testing::run_ranks;
using apex::testing::ThreadBackendControl;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWorld = 2;

ToyModel toy_model() { return ToyModel::mlp({4, 8, 8, 8, 2}, 1); }

ReducerOptions small_buckets() {
  ReducerOptions options;
  options.limits.cap = 30;
  return options;
}

void backward(Reducer& reducer, ToyModel& model, int seed) {
  model.zero_grad();
  reducer.prepare_for_forward();
  const at::Tensor y = model.forward(apex::testing::random_batch(4, 4, seed));
  reducer.watch_outputs({y});
  y.square().mean().backward();
}

/// The first layer's gradient, which is computed last, comes after the first bucket has arrived.
void backward_behind_first_bucket(ThreadBackendControl& control, Reducer& reducer, ToyModel& model,
                                  int rank) {
  const uint64_t first = control.issued(rank);
  const auto hook =
      model[0].register_hook([&](const at::Tensor&) { control.wait_until_completed(first); });
  backward(reducer, model, rank);
  model[0].remove_hook(hook);
}

void expect_in_order(const OverlapReport& report) {
  EXPECT_LE(0, report.last_gradient_s);
  EXPECT_LE(report.last_gradient_s, report.backward_s);
  EXPECT_GE(report.exposed_s, 0);
  EXPECT_GE(report.hidden_s, 0);
  for (const BucketOverlap& bucket : report.buckets) {
    EXPECT_LE(0, bucket.ready_s);
    EXPECT_LE(bucket.ready_s, bucket.launched_s);
    EXPECT_LE(bucket.launched_s, bucket.arrived_s);
    EXPECT_LE(report.last_gradient_s, bucket.awaited_s);
  }
}

std::vector<std::vector<int64_t>> members(const OverlapReport& report) {
  std::vector<std::vector<int64_t>> all;
  for (const BucketOverlap& bucket : report.buckets) all.push_back(bucket.parameters);
  return all;
}

TEST(ReducerOverlap, RecordedOrNot_ReportIsOfTheLastBackwardOrAbsent) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = toy_model();
    Reducer reducer(model.parameters, {group}, small_buckets());
    backward(reducer, model, rank);
    EXPECT_FALSE(reducer.overlap_report());
    reducer.record_overlap(true);
    EXPECT_FALSE(reducer.overlap_report()) << "nothing has been recorded yet";
    backward(reducer, model, rank);
    const auto report = reducer.overlap_report();
    ASSERT_TRUE(report);
    expect_in_order(*report);
    EXPECT_EQ(report->clock, OverlapClock::kHost);
    EXPECT_GT(report->buckets.size(), 2u);
    EXPECT_EQ(members(*report), reducer.plan()->buckets);
    for (const BucketOverlap& bucket : report->buckets) {
      EXPECT_LE(bucket.ready_s, report->last_gradient_s);
      EXPECT_LE(bucket.arrived_s, report->backward_s);
      int64_t elements = 0;
      ASSERT_EQ(bucket.names.size(), bucket.parameters.size());
      for (size_t i = 0; i < bucket.parameters.size(); ++i) {
        EXPECT_EQ(bucket.names[i], model.parameters[bucket.parameters[i]].name);
        elements += model[bucket.parameters[i]].numel();
      }
      EXPECT_GE(bucket.bytes, 4 * elements);
    }
    reducer.record_overlap(true);  // it is already on
    EXPECT_TRUE(reducer.overlap_report());
    // A backward without synchronization is not reported.
    reducer.set_synchronizing(false);
    backward(reducer, model, rank);
    reducer.set_synchronizing(true);
    EXPECT_EQ(reducer.overlap_report()->backward_s, report->backward_s);
    reducer.record_overlap(false);
    EXPECT_FALSE(reducer.overlap_report());
    backward(reducer, model, rank);
    EXPECT_FALSE(reducer.overlap_report());
  });
}

TEST(ReducerOverlap, BackwardThatLearns_IsReportedToo) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = toy_model();
    Reducer reducer(model.parameters, {group}, small_buckets());
    reducer.record_overlap(true);
    backward(reducer, model, rank);
    const auto report = reducer.overlap_report();
    ASSERT_TRUE(report);
    expect_in_order(*report);
    EXPECT_EQ(members(*report), reducer.plan()->buckets);
    // Gradients were ready one by one, and sent after the last one.
    for (const BucketOverlap& bucket : report->buckets) {
      EXPECT_LE(bucket.ready_s, report->last_gradient_s);
      EXPECT_LE(report->last_gradient_s, bucket.launched_s);
    }
    EXPECT_LT(report->buckets.front().ready_s, report->buckets.back().ready_s);
  });
}

TEST(ReducerOverlap, BucketThatArrivesDuringBackward_IsHidden) {
  const auto control = ThreadBackendControl::create(kWorld);
  run_ranks(control, [&](int rank, const Group& group) {
    ToyModel model = toy_model();
    Reducer reducer(model.parameters, {group}, small_buckets());
    backward(reducer, model, rank);
    reducer.record_overlap(true);
    backward_behind_first_bucket(*control, reducer, model, rank);
    const auto report = reducer.overlap_report();
    ASSERT_TRUE(report);
    expect_in_order(*report);
    EXPECT_LE(report->buckets.front().arrived_s, report->last_gradient_s) << "told by the wait";
    EXPECT_EQ(report->buckets.front().exposed_s, 0);
    EXPECT_GT(report->hidden_s, 0);
  });
}

TEST(ReducerOverlap, EverythingSentAtTheEnd_IsExposed) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = toy_model();
    ReducerOptions options = small_buckets();
    options.delay_allreduce = true;
    Reducer reducer(model.parameters, {group}, options);
    reducer.record_overlap(true);
    for (int step = 0; step < 2; ++step) {
      backward(reducer, model, rank + step);
      const auto report = reducer.overlap_report();
      ASSERT_TRUE(report);
      expect_in_order(*report);
      ASSERT_EQ(report->buckets.size(), 1u);
      EXPECT_LE(report->last_gradient_s, report->buckets[0].launched_s);
      EXPECT_DOUBLE_EQ(report->exposed_s, report->communication_s);
      EXPECT_NEAR(report->hidden_fraction, 0, 1e-9);
    }
  });
}

TEST(ReducerOverlap, RankThatMissesAGradient_IsReadyWhenItIsSent) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = toy_model();
    Reducer reducer(model.parameters, {group}, small_buckets());
    reducer.record_overlap(true);
    const auto step = [&](bool skips) {
      model.zero_grad();
      reducer.prepare_for_forward();
      // Rank 1 does not use the last bias.
      at::Tensor y = apex::testing::random_batch(4, 4, rank).to(at::kFloat);
      for (size_t i = 0; i < model.size(); i += 2) {
        y = y.matmul(model[i].t());
        if (!skips || i + 2 < model.size()) y = y + model[i + 1];
      }
      reducer.watch_outputs({y});
      y.square().mean().backward();
    };
    step(false);
    step(rank == 1);
    const auto report = reducer.overlap_report();
    ASSERT_TRUE(report);
    expect_in_order(*report);
    const auto missed = static_cast<int64_t>(model.size()) - 1;
    for (const BucketOverlap& bucket : report->buckets) {
      const bool misses =
          rank == 1 && std::count(bucket.parameters.begin(), bucket.parameters.end(), missed) == 1;
      EXPECT_EQ(bucket.ready_s == bucket.launched_s, misses) << bucket.names.front();
      EXPECT_EQ(bucket.ready_s > report->last_gradient_s, misses) << bucket.names.front();
    }
  });
}

TEST(ReducerOverlap, FailedBackward_LeavesTheReportOfTheLastOne) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = toy_model();
    Reducer reducer(model.parameters, {group}, small_buckets());
    reducer.record_overlap(true);
    backward(reducer, model, rank);
    const double before = reducer.overlap_report()->backward_s;
    const auto hook = model[0].register_hook(
        [](const at::Tensor&) { throw std::runtime_error("as a test wants it"); });
    EXPECT_THROW(backward(reducer, model, rank), std::runtime_error);
    model[0].remove_hook(hook);
    EXPECT_EQ(reducer.overlap_report()->backward_s, before);
    backward(reducer, model, rank);
    expect_in_order(*reducer.overlap_report());
    EXPECT_NE(reducer.overlap_report()->backward_s, before);
    EXPECT_EQ(members(*reducer.overlap_report()), reducer.plan()->buckets);
  });
}

TEST(ReducerOverlap, CommunicationHook_IsTimedByItsFuture) {
  const auto control = ThreadBackendControl::create(kWorld);
  run_ranks(control, [&](int rank, const Group& group) {
    ToyModel model = toy_model();
    Reducer reducer(model.parameters, {group}, small_buckets());
    reducer.set_comm_hook(make_compress_hook(group, at::kHalf));
    backward(reducer, model, rank);
    reducer.record_overlap(true);
    backward_behind_first_bucket(*control, reducer, model, rank);
    const auto report = reducer.overlap_report();
    ASSERT_TRUE(report);
    expect_in_order(*report);
    EXPECT_LE(report->buckets.front().arrived_s, report->last_gradient_s);
    EXPECT_EQ(report->buckets.size(), reducer.plan()->buckets.size());
  });
}

TEST(ReducerOverlap, SparseGradient_IsSentAtTheEnd) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model;
    model.parameters = {{"table", at::rand({10, 3}).requires_grad_()},
                        {"weight", at::rand({3, 2}).requires_grad_()}};
    Reducer reducer(model.parameters, {group}, small_buckets());
    reducer.record_overlap(true);
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      reducer.prepare_for_forward();
      const at::Tensor rows =
          at::embedding(model[0], at::tensor({rank, 3, 5}), -1, false, /*sparse=*/true);
      const at::Tensor y = rows.matmul(model[1]);
      reducer.watch_outputs({y});
      y.sum().backward();
    }
    const auto report = reducer.overlap_report();
    ASSERT_TRUE(report);
    expect_in_order(*report);
    const auto found = std::find_if(
        report->buckets.begin(), report->buckets.end(),
        [](const auto& bucket) { return bucket.parameters == std::vector<int64_t>{0}; });
    ASSERT_NE(found, report->buckets.end());
    EXPECT_LE(report->last_gradient_s, found->launched_s);
    EXPECT_GE(found->bytes, 3 * (3 * 4 + 8)) << "three rows of float32, and their numbers";
  });
}

TEST(ReducerOverlap, RankWithoutData_ReportsTheBackwardThatItShadows) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = toy_model();
    Reducer reducer(model.parameters, {group}, small_buckets());
    reducer.begin_join(true);
    const auto step = [&] {
      reducer.announce(JoinEvent::kForward, 0);
      backward(reducer, model, rank);
    };
    step();
    reducer.record_overlap(true);
    if (rank == 0) step();
    reducer.follow_until_end([](const JoinEvent&) {});
    const auto report = reducer.overlap_report();
    ASSERT_TRUE(report);
    expect_in_order(*report);
    EXPECT_EQ(members(*report), reducer.plan()->buckets);
  });
}

/// A collective whose completion time is unknown, as from a backend without futures.
class SilentWork final : public c10d::Work {
 public:
  explicit SilentWork(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  bool isCompleted() override { return work_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override { return work_->wait(timeout); }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
};

class SilentBackend final : public c10d::Backend {
 public:
  explicit SilentBackend(c10::intrusive_ptr<c10d::Backend> backend)
      : c10d::Backend(backend->getRank(), backend->getSize()), backend_(std::move(backend)) {}
  const std::string getBackendName() const override { return "silent"; }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return c10::make_intrusive<SilentWork>(backend_->broadcast(tensors, options));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    return c10::make_intrusive<SilentWork>(backend_->allreduce(tensors, options));
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override {
    return c10::make_intrusive<SilentWork>(backend_->allgather(outputs, inputs, options));
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override {
    return c10::make_intrusive<SilentWork>(backend_->_allgather_base(output, input, options));
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
};

TEST(ReducerOverlap, BackendWithoutFutures_BucketsArriveWhenTheyAreAwaited) {
  const auto control = ThreadBackendControl::create(kWorld);
  run_ranks(control, [&](int rank, const Group& thread_group) {
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(
        c10::make_intrusive<c10d::HashStore>(), rank, kWorld);
    const c10::intrusive_ptr<c10d::Backend> backend =
        c10::make_intrusive<SilentBackend>(thread_group->getBackend(at::kCPU));
    group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
    ToyModel model = toy_model();
    Reducer reducer(model.parameters, {group}, small_buckets());
    backward(reducer, model, rank);
    reducer.record_overlap(true);
    backward(reducer, model, rank);
    const auto report = reducer.overlap_report();
    ASSERT_TRUE(report);
    expect_in_order(*report);
    for (const BucketOverlap& bucket : report->buckets) {
      EXPECT_LE(bucket.awaited_s, bucket.arrived_s);
      EXPECT_LE(bucket.arrived_s, report->backward_s);
    }
  });
}

TEST(ReducerOverlap, OneRank_NothingIsInFlight) {
  run_ranks(1, [](int, const Group& group) {
    ToyModel model = toy_model();
    Reducer reducer(model.parameters, {group}, small_buckets());
    reducer.record_overlap(true);
    for (int step = 0; step < 2; ++step) backward(reducer, model, step);
    const auto report = reducer.overlap_report();
    ASSERT_TRUE(report);
    expect_in_order(*report);
    ASSERT_GT(report->buckets.size(), 1u);
    for (const BucketOverlap& bucket : report->buckets) {
      EXPECT_LE(bucket.arrived_s, bucket.awaited_s);  // long before the wait
    }
  });
}

TEST(ReducerOverlap, SwitchedDuringBackward_Throws) {
  run_ranks(1, [](int, const Group& group) {
    ToyModel model = toy_model();
    Reducer reducer(model.parameters, {group}, small_buckets());
    int refused = 0;
    const auto hook = model[0].register_hook([&](const at::Tensor&) {
      try {
        reducer.record_overlap(true);
      } catch (const Error&) {
        ++refused;
      }
    });
    backward(reducer, model, 0);
    model[0].remove_hook(hook);
    EXPECT_EQ(refused, 1);
    EXPECT_FALSE(reducer.overlap_report());
  });
}

}  // namespace
}  // namespace apex::parallel
