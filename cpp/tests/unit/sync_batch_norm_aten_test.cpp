// SPDX-License-Identifier: BSD-3-Clause
#include "batch_norm/sync_batch_norm_aten.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include <apex/error.h>
#include <apex/parallel/sync_batch_norm.h>
#include <support/cuda_emulator/cuda_emulator.h>
#include <support/fake_capture.h>
#include <support/fake_device.h>
#include <support/thread_backend.h>

// Batch norm by ATen's operators, and the conditions for using them. SyncBatchNormFake also runs
// with APEX_SYNC_BATCH_NORM=aten.

namespace apex::parallel {
namespace {

namespace fake = testing::fake;
using testing::cuda::Fault;

/// Few ranks gather, many ranks sum; see Note [Statistics of many ranks].
TEST(SyncBatchNormAten, RanksThatChooseDifferently_ExchangeTheSame_EqualWholeBatch) {
  for (const int world : {5, 70}) {
    std::vector<int64_t> cuts{0};
    for (int rank = 0; rank < world; ++rank) cuts.push_back(cuts.back() + 7 * rank % 4);  // 0 to 3
    const at::Tensor means = at::tensor({0.0, 5.0, -30.0}, at::kDouble).view({1, 3, 1});
    const at::Tensor all = at::randn({cuts.back(), 3, 4}, at::kDouble) + means,
                     dys = at::randn({cuts.back(), 3, 4}, at::kDouble);
    const at::Tensor whole = all.clone().requires_grad_();
    const at::Tensor want = sync_batch_norm(whole, {});
    const at::Tensor dx_want = torch::autograd::grad({want}, {whole}, {dys})[0];
    const auto control = testing::ThreadBackendControl::create(world);
    const std::string name = "of ranks that choose differently";
    testing::run_ranks(
        control,
        [&](int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
          const auto part = [&](const at::Tensor& of) {
            return of.slice(0, cuts[rank], cuts[rank + 1]);
          };
          const at::Tensor x = part(all).clone(), dy = part(dys);
          at::Tensor y, dx;
          if (rank % 3 == 1) {
            const std::optional<at::Tensor> none;
            const detail::ForwardArguments forward{x,    none, none, none,  none,  none,
                                                   none, 0.1,  1e-5, false, false, name};
            const auto [out, mean, invstd, n] =
                detail::kAten.forward(forward, detail::ForwardCall(forward));
            const std::optional<at::Tensor> count = n;
            const detail::BackwardArguments backward{
                dy,     x,     none, none,  none,  mean,
                invstd, count, 1e-5, false, false, {true, false, false, false},
                name};
            y = out;
            dx = std::get<0>(detail::kAten.backward(backward, detail::BackwardCall(backward)));
          } else {
            SyncBatchNormArguments arguments;
            arguments.process_group = group;
            y = sync_batch_norm(x.requires_grad_(), arguments);
            dx = torch::autograd::grad({y}, {x}, {dy})[0];
          }
          EXPECT_TRUE(at::allclose(y, part(want), 1e-6, 1e-6)) << rank << " of " << world;
          EXPECT_TRUE(at::allclose(dx, part(dx_want), 1e-6, 1e-6)) << rank << " of " << world;
          EXPECT_EQ(control->issued(rank, "_allgather_base"), world > 64 ? 0U : 1U);
          EXPECT_EQ(control->issued(rank, "allreduce"), world > 64 ? 2U : 1U);
        },
        name);
  }
}

struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

class SyncBatchNormChoice : public ::testing::Test {
 protected:
  SyncBatchNormChoice()
      : guard_(fake::new_stream("training")),
        handler_(&warnings_),
        variable_(std::getenv("APEX_SYNC_BATCH_NORM")) {
    unsetenv("APEX_SYNC_BATCH_NORM");
    detail::forget_choices();
  }
  ~SyncBatchNormChoice() override {
    testing::cuda::set_fault(Fault::kNone);
    detail::forget_choices();
    if (variable_ != nullptr) setenv("APEX_SYNC_BATCH_NORM", variable_, 1);
    fake::detector().reset();
  }

  /// The number of launches of a forward; checks its result.
  static int64_t launches_of_forward(at::ScalarType dtype) {
    const at::Tensor x = at::randn({4, 3, 5}).to(dtype);
    const at::Tensor on_device = x.to(fake::device(), /*non_blocking=*/true);
    const int64_t before = testing::cuda::launches();
    const at::Tensor y = sync_batch_norm(on_device, {});
    const int64_t launches = testing::cuda::launches() - before;
    const double unit = dtype == at::kBFloat16 ? 2e-2 : dtype == at::kHalf ? 2e-3 : 1e-5;
    EXPECT_TRUE(at::allclose(fake::peek(y), sync_batch_norm(x, {}), unit, unit));
    return launches;
  }

  const c10::StreamGuard guard_;
  Warnings warnings_;
  const c10::WarningUtils::WarningHandlerGuard handler_;
  const char* const variable_;
};

TEST_F(SyncBatchNormChoice, KernelsThatAgree_AreUsedAndComparedOncePerType) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    EXPECT_GT(launches_of_forward(dtype), 2) << dtype;
    EXPECT_EQ(launches_of_forward(dtype), 2) << dtype;
  }
  EXPECT_TRUE(warnings_.messages.empty()) << warnings_.messages[0];
}

TEST_F(SyncBatchNormChoice, KernelsThatFailOrDiffer_AreReplacedWithOneWarning) {
  for (const Fault fault : {Fault::kLaunchesFail, Fault::kBlocksAreLost}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      detail::forget_choices();
      warnings_.messages.clear();
      testing::cuda::set_fault(fault);
      launches_of_forward(dtype);
      EXPECT_EQ(launches_of_forward(dtype), 0) << dtype;
      ASSERT_EQ(warnings_.messages.size(), 1u) << dtype;
      const std::string& text = warnings_.messages[0];
      EXPECT_NE(text.find("Please report"), std::string::npos) << text;
      EXPECT_NE(text.find(fault == Fault::kLaunchesFail ? "launches fail" : "give a wrong"),
                std::string::npos)
          << text;
    }
  }
}

TEST_F(SyncBatchNormChoice, DuringACapture_NothingIsCompared) {
  const at::Tensor x = at::randn({4, 3, 5}).to(fake::device(), /*non_blocking=*/true);
  fake::Graph graph;
  graph.begin(fake::current_stream());
  sync_batch_norm(x, {});
  graph.end();
  EXPECT_EQ(graph.errors(), std::vector<std::string>{});
  EXPECT_EQ(graph.size(), 3u);  // and the counters
  EXPECT_GT(launches_of_forward(at::kFloat), 2);
}

TEST_F(SyncBatchNormChoice, TheEnvironment_ChoosesWithoutAComparison) {
  testing::cuda::set_fault(Fault::kLaunchesFail);
  setenv("APEX_SYNC_BATCH_NORM", "aten", 1);
  EXPECT_EQ(launches_of_forward(at::kFloat), 0);
  testing::cuda::set_fault(Fault::kNone);
  detail::forget_choices();
  setenv("APEX_SYNC_BATCH_NORM", "apex", 1);
  EXPECT_EQ(launches_of_forward(at::kFloat), 2);
  detail::forget_choices();
  setenv("APEX_SYNC_BATCH_NORM", "torch", 1);
  EXPECT_THROW(launches_of_forward(at::kFloat), InvalidArgument);
  unsetenv("APEX_SYNC_BATCH_NORM");
  EXPECT_TRUE(warnings_.messages.empty());
}

}  // namespace
}  // namespace apex::parallel
