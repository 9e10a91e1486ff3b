// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/types.h>

#include <apex/c_api.h>
#include <apex/error.h>
#include <support/thread_backend.h>

#include "c_api/notified_reducer.h"

namespace apex::parallel::detail {
namespace {

using apex::testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::vector<at::Tensor> filled(double value, at::ScalarType dtype) {
  const auto options = at::TensorOptions(dtype);
  return {at::full({3, 4}, value, options), at::full({5}, value, options).flip(0),
          at::full({2, 6}, value, options).t(), at::full({}, value, options),
          at::full({0, 2}, value, options)};
}

TEST(NotifiedReducer, AnyOrderOfNotifications_Synchronize_GradientsAreAverages) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{40}}) {
      run_ranks(3, [&](int rank, const Group& group) {
        const auto parameters = filled(rank, dtype);
        auto gradients = filled(0, dtype);
        NotifiedReducer reducer(group, parameters, gradients, bytes);
        for (const at::Tensor& parameter : parameters)
          EXPECT_EQ(parameter.ne(0).sum().item<int>(), 0);
        for (int step = 1; step <= 3; ++step) {
          // A different order on every rank, and rank 2 omits one.
          for (size_t i = 0; i < gradients.size(); ++i) {
            const size_t index = (i + static_cast<size_t>(rank)) % gradients.size();
            gradients[index].fill_((rank + 1) * step);
            if (rank == 2 && index == 1) continue;
            reducer.gradient_ready(index);
          }
          EXPECT_THROW(reducer.gradient_ready(0), InvalidArgument);
          reducer.synchronize();
          for (size_t i = 0; i < gradients.size(); ++i) {
            const double expected = i == 1 ? step : 2.0 * step;
            EXPECT_TRUE(gradients[i].eq(expected).all().item<bool>()) << i << " " << gradients[i];
          }
        }
        EXPECT_THROW(reducer.gradient_ready(gradients.size()), InvalidArgument);
      });
    }
  }
}

// In the first step rank r has r + 1 samples, in the second rank 1 has none, in the third no rank
// has any.
TEST(NotifiedReducer, Weighted_GradientsAreSumsByTheSumOfWeights) {
  run_ranks(3, [&](int rank, const Group& group) {
    std::vector<at::Tensor> gradients{at::zeros({4}), at::zeros({2, 2})};
    NotifiedReducer reducer(group, {at::ones({4}), at::ones({2, 2})}, gradients, 0, true);
    const double weights[][3] = {{1, 2, 3}, {4, 0, 1}, {0, 0, 0}, {0.5, 1, 2}};
    for (const auto& weight : weights) {
      double sum = 0, total = 0;
      for (int r = 0; r < 3; ++r) {
        sum += weight[r] * (r + 1);
        total += weight[r];
      }
      reducer.set_weight(7);  // the last call counts
      reducer.set_weight(weight[rank]);
      for (size_t i = 0; i < gradients.size(); ++i) {
        gradients[i].fill_(weight[rank] * (rank + 1));
        reducer.gradient_ready(i);
      }
      reducer.synchronize();
      const double mean = total == 0 ? 0 : sum / total;
      for (const at::Tensor& gradient : gradients)
        EXPECT_TRUE(at::allclose(gradient, at::full_like(gradient, mean))) << gradient;
    }
    // A weight applies to its own step only; afterwards training continues.
    gradients[0].fill_(1);
    gradients[1].fill_(1);
    reducer.gradient_ready(0);
    EXPECT_THROW(reducer.synchronize(), RankMismatch);
    reducer.set_weight(1);
    reducer.gradient_ready(0);
    reducer.synchronize();
    EXPECT_TRUE(gradients[0].eq(1).all().item<bool>()) << gradients[0];
    NotifiedReducer plain(group, {at::ones({4})}, {gradients[0]}, 0);
    EXPECT_THROW(plain.set_weight(1), InvalidArgument);
  });
}

TEST(NotifiedReducer, OtherShapesOnOneRank_Constructed_ThrowsOnEveryRank) {
  run_ranks(2, [](int rank, const Group& group) {
    const std::vector<at::Tensor> tensors{at::zeros({2 + rank})};
    EXPECT_THROW(NotifiedReducer(group, tensors, {tensors[0].clone()}, 0), RankMismatch);
    EXPECT_THROW(NotifiedReducer(group, tensors, {at::zeros({7})}, 0), InvalidArgument);
  });
}

TEST(NotifiedReducer, ExpandedTensors_ParametersAreTaken_GradientsAreRefused) {
  run_ranks(2, [](int rank, const Group& group) {
    const at::Tensor parameter = at::full({1}, rank + 1.0).expand({3});
    const at::Tensor gradient = at::full({3}, rank + 1.0);
    EXPECT_THROW(NotifiedReducer(group, {parameter}, {gradient.narrow(0, 0, 1).expand({3})}, 0),
                 InvalidArgument);
    NotifiedReducer reducer(group, {parameter}, {gradient}, 0);
    EXPECT_TRUE(parameter.eq(1.0).all().item<bool>());
    reducer.gradient_ready(0);
    reducer.synchronize();
    EXPECT_TRUE(gradient.eq(1.5).all().item<bool>());
  });
}

/// This process's group of one rank, over a file store.
class CApi : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string file = ::testing::TempDir() + "/apex_c_api_" + std::to_string(::getpid());
    std::remove(file.c_str());
    ASSERT_EQ(apex_init("gloo", ("file://" + file).c_str(), 0, 1, 10000, &group_), APEX_OK)
        << apex_last_error();
  }
  void TearDown() override { apex_shutdown(group_); }

  void refused(apex_status status, const std::string& words) {
    EXPECT_EQ(status, APEX_INVALID_ARGUMENT);
    EXPECT_NE(std::string(apex_last_error()).find(words), std::string::npos) << apex_last_error();
  }

  apex_group* group_ = nullptr;
};

TEST_F(CApi, BadArguments_AnyFunction_StatusAndMessage) {
  refused(apex_init("gloo", "file:///tmp/x", 0, 1, 0, &group_),
          "apex_init(): init_process_group()");
  refused(apex_init("gloo", nullptr, 0, 1, 0, nullptr), "group is NULL");
  refused(apex_init(nullptr, nullptr, 0, 1, 0, &group_), "backend is NULL");
  EXPECT_EQ(apex_rank(nullptr), -1);
  float values[2] = {1, 2};
  const int64_t two[] = {2}, negative[] = {-2};
  const apex_tensor good{values, 1, two, nullptr, APEX_FLOAT32, -1};
  apex_tensor bad = good;
  bad.data = nullptr;
  refused(apex_all_reduce(group_, &bad, APEX_SUM), "pointer of a tensor is NULL");
  refused(apex_all_reduce(group_, nullptr, APEX_SUM), "tensor is NULL");
  refused(apex_all_reduce(nullptr, &good, APEX_SUM), "group is NULL");
  refused(apex_all_reduce(group_, &good, static_cast<apex_reduce_op>(9)),
          "unknown reduction operation 9");
  bad = good;
  bad.sizes = negative;
  refused(apex_broadcast(group_, &bad, 0), "negative size -2");
  bad = good;
  bad.strides = negative;
  refused(apex_broadcast(group_, &bad, 0), "negative stride");
  bad = good;
  bad.dtype = static_cast<apex_dtype>(99);
  refused(apex_broadcast(group_, &bad, 0), "unknown dtype 99");
  bad = good;
  bad.device = -2;
  refused(apex_broadcast(group_, &bad, 0), "device of a tensor is -2");
  bad.device = 256;  // wraps around to device 0 in an 8-bit index
  refused(apex_broadcast(group_, &bad, 0), "device of a tensor is 256");
  // A device type that this libtorch may not support; its own error is a page about dispatchers.
  bad.device = 100;
  for (const auto call : {+[](apex_group* group, const apex_tensor* tensor) {
                            return apex_all_reduce(group, tensor, APEX_SUM);
                          },
                          +[](apex_group* group, const apex_tensor* tensor) {
                            return apex_broadcast(group, tensor, 0);
                          }}) {
    refused(call(group_, &bad), "the device of a tensor is 100; it must be -1 (the CPU)");
    EXPECT_LT(std::string(apex_last_error()).size(), 150u) << apex_last_error();
  }
  refused(apex_broadcast(group_, &good, 3), "root rank 3 is not in the group");
  // Hazard: an overflowed size looks like a small tensor, and memory past its end is written.
  const int64_t most = std::numeric_limits<int64_t>::max();
  const int64_t huge[][2] = {
      {most / 4 + 1, 1}, {int64_t{1} << 32, int64_t{1} << 32}, {most, 0}, {0, most}};
  const int64_t small[] = {2, 2}, far[] = {most, 1}, far_in_bytes[] = {most / 2, 1};
  for (const int64_t* sizes : huge) {
    const apex_tensor wide{values, 2, sizes, nullptr, APEX_FLOAT32, -1};
    refused(apex_all_reduce(group_, &wide, APEX_SUM), "more than 2^63 bytes");
  }
  for (const int64_t* strides : {far, far_in_bytes}) {
    const apex_tensor wide{values, 2, small, strides, APEX_FLOAT32, -1};
    refused(apex_broadcast(group_, &wide, 0), "more than 2^63 bytes");
  }
  apex_reducer* reducer = nullptr;
  refused(apex_reducer_create(group_, nullptr, nullptr, 1, 0, &reducer), "parameters is NULL");
  refused(apex_reducer_create(group_, &good, &good, 1, -1, &reducer), "-1");
  EXPECT_EQ(reducer, nullptr);
  ASSERT_EQ(apex_reducer_create(group_, &good, &good, 1, 0, &reducer), APEX_OK);
  refused(apex_reducer_prepare_forward(reducer), "apex_reducer_create_torch()");
  refused(apex_reducer_gradient_ready(reducer, 1), "gradient 1 does not exist");
  refused(apex_reducer_set_weight(reducer, 1), "the reducer is not weighted");
  refused(apex_reducer_set_weight(nullptr, 1), "reducer is NULL");
  apex_reducer_destroy(reducer);
  ASSERT_EQ(apex_reducer_create_weighted(group_, &good, &good, 1, 0, &reducer), APEX_OK);
  ASSERT_EQ(apex_reducer_gradient_ready(reducer, 0), APEX_OK);
  EXPECT_NE(apex_reducer_synchronize(reducer), APEX_OK);
  EXPECT_NE(std::string(apex_last_error()).find("apex_reducer_set_weight()"), std::string::npos)
      << apex_last_error();
  apex_reducer_destroy(reducer);
  apex_reducer_destroy(nullptr);
}

TEST_F(CApi, TorchParameters_Backward_TheEngineRuns) {
  at::Tensor weight = at::ones({3}).requires_grad_();
  void* parameters[] = {&weight};
  const char* names[] = {"weight"};
  apex_reducer* reducer = nullptr;
  ASSERT_EQ(apex_reducer_create_torch(group_, parameters, names, 1, 0, &reducer), APEX_OK)
      << apex_last_error();
  refused(apex_reducer_synchronize(reducer), "apex_reducer_create()");
  ASSERT_EQ(apex_reducer_set_synchronizing(reducer, 0), APEX_OK);
  ASSERT_EQ(apex_reducer_set_synchronizing(reducer, 1), APEX_OK);
  ASSERT_EQ(apex_reducer_prepare_forward(reducer), APEX_OK);
  (weight * 2).sum().backward();
  EXPECT_TRUE(weight.grad().eq(2).all().item<bool>());
  apex_reducer_destroy(reducer);
  EXPECT_NE(apex_reducer_create_torch_weighted(group_, parameters, names, 1, 0, nullptr), APEX_OK);
  ASSERT_EQ(apex_reducer_create_torch_weighted(group_, parameters, names, 1, 0, &reducer), APEX_OK);
  weight.mutable_grad() = at::Tensor();
  for (const double samples : {3.0, 1.0}) {  // two micro-batches
    ASSERT_EQ(apex_reducer_set_synchronizing(reducer, samples == 1.0), APEX_OK);
    ASSERT_EQ(apex_reducer_set_weight(reducer, samples), APEX_OK) << apex_last_error();
    (weight * 2 * samples).sum().backward();
  }
  EXPECT_TRUE(weight.grad().eq(2).all().item<bool>()) << weight.grad();
  apex_reducer_destroy(reducer);
  void* none[] = {nullptr};
  refused(apex_reducer_create_torch(group_, none, nullptr, 1, 0, &reducer), "a parameter is NULL");
}

}  // namespace
}  // namespace apex::parallel::detail
