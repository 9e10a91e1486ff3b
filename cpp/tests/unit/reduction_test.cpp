// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/reducer.h>
#include <support/reducer_steps.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

#include "reducer/reduction.h"

// Another way to reduce a bucket is a separate class; no other code depends on it.

namespace apex::parallel {
namespace {

using apex::testing::run_ranks;
using apex::testing::ThreadBackendControl;
using apex::testing::ToyModel;
using detail::BucketMessage;
using detail::Reduction;
using detail::ReductionSite;
using detail::ReductionTraits;

/// Sends the message back to front.
class ReversedAllReduce final : public Reduction {
 public:
  ReversedAllReduce(GroupPtr group, std::shared_ptr<int> started)
      : group_(std::move(group)), started_(std::move(started)) {}

  ReductionTraits traits() const override { return {}; }
  std::string describe() const override { return "reversed all-reduce of bucket "; }
  void start(const BucketMessage&, const at::Tensor& tensor, const std::string&) override {
    ++*started_;
    tensor_ = tensor;
    messages_ = {tensor.flip(0)};
    work_ = group_->allreduce(messages_);
  }
  void wait(const std::string&, const std::function<void()>&) override {
    if (!work_) return;
    work_->wait();
    work_.reset();
    tensor_.copy_(messages_.front().flip(0));
  }
  bool done() const override { return work_ && work_->isCompleted(); }
  void drop() noexcept override { work_.reset(); }

 private:
  const GroupPtr group_;
  const std::shared_ptr<int> started_;
  at::Tensor tensor_;
  std::vector<at::Tensor> messages_;
  c10::intrusive_ptr<c10d::Work> work_;
};

TEST(Reduction, OfTheCallersOwn_SeveralSteps_AveragesIncludingUnusedParameters) {
  for (const bool views : {false, true}) {
    run_ranks(ThreadBackendControl::create(2), [&](int rank, const GroupPtr& group) {
      ToyModel model = ToyModel::mlp({4, 8, 8, 2}, 1);
      std::vector<NamedTensor> parameters = model.parameters;
      parameters.push_back({"unused", at::zeros({3}).requires_grad_()});
      const auto started = std::make_shared<int>(0);
      ReducerOptions options;
      options.limits.cap = 40;
      options.gradient_as_bucket_view = views;
      options.reduction_factory = [&](const ReductionSite& site) {
        return std::make_unique<ReversedAllReduce>(site.group, started);
      };
      Reducer reducer(parameters, {group}, options);
      for (int step = 0; step < 4; ++step) {
        model.zero_grad();
        apex::testing::loss_of(forward(reducer, model, apex::testing::batch(rank, step)))
            .backward();
        apex::testing::expect_average(model, 2, step, "reversed");
        EXPECT_FALSE(parameters.back().tensor.grad().defined());
      }
      const auto statistics = reducer.statistics();
      EXPECT_EQ(*started, statistics.launched_in_backward + statistics.launched_at_end);
      EXPECT_GT(reducer.plan()->buckets.size(), 1u);
    });
  }
}

TEST(Averaging, EveryWay_BeforeAndAfter_GiveTheAverage) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const double factor : {1.0, 4.0}) {
      for (const bool averages : {false, true}) {
        for (const int64_t divisor : {3, 8}) {
          ReducerOptions options;
          options.gradient_predivide_factor = factor;
          ReductionTraits traits;
          traits.averages = averages;
          const auto [before, after] = detail::averaging_of(options, traits, dtype, divisor, 8);
          EXPECT_DOUBLE_EQ(before * (averages ? 1.0 / 8 : 1.0) * after,
                           1.0 / static_cast<double>(divisor));
          // Dividing first would underflow small 16-bit gradients.
          EXPECT_EQ(before, averages ? 1.0 : 1.0 / factor);
        }
      }
    }
  }
}

}  // namespace
}  // namespace apex::parallel
