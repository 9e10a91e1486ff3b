// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/batch_norm_device.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "emulated/emulated_launch.h"
#include "support/cuda_emulator/cuda_emulator.h"

// Device code shared by the batch-norm CUDA kernels, in kernels small enough to try many thread
// orders.

namespace apex::kernels {
namespace {

using testing::cuda::launch;
using testing::cuda::set_order;

inline __global__ void hand_over_kernel(double* values, unsigned* counter, double* sum) {
  values[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  if (!is_last_block(counter, gridDim.x)) {
    return;
  }
  if (threadIdx.x == blockDim.x - 1) {
    for (unsigned i = 0; i < gridDim.x * blockDim.x; ++i) {
      *sum += __ldcg(values + i);
    }
  }
}

TEST(BatchNormDevice, LastBlock_InAnyOrder_SeesWhatAllHaveWritten) {
  unsigned counter = 0;  // shared by all launches
  for (uint64_t order = 0; order < 100; ++order) {
    set_order(order);
    std::vector<double> values(5 * 64);
    double sum = 0;
    ASSERT_EQ(launch(5, 64, hand_over_kernel, values.data(), &counter, &sum), cudaSuccess);
    EXPECT_EQ(sum, 5 * 64) << "order " << order;
    EXPECT_EQ(counter, 0u);
  }
  set_order(0);
}

inline __global__ void block_sum_kernel(const double* values, Sums* sums) {
  const Sums all = block_sum({values[threadIdx.x], -values[threadIdx.x]});
  if (threadIdx.x < 32) {
    sums[threadIdx.x] = all;
  }
}

TEST(BatchNormDevice, BlockSum_AnyNumberOfWarps_IsInEachThreadOfTheFirst) {
  for (const unsigned threads : {32, 64, 512, 1024}) {
    set_order(threads % 7);
    std::vector<double> values(threads);
    std::iota(values.begin(), values.end(), 1.0);
    std::vector<Sums> sums(32);
    ASSERT_EQ(launch(1, threads, block_sum_kernel, values.data(), sums.data()), cudaSuccess);
    for (const Sums& sum : sums) {
      EXPECT_EQ(sum.first, threads * (threads + 1.0) / 2);
      EXPECT_EQ(sum.second, -sum.first);
    }
  }
  set_order(0);
}

TEST(BatchNormDevice, FastReciprocals_AnyNumber_AreThoseOfFloat64) {
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> exponent(-100, 100);
  for (int i = 0; i < 10'000; ++i) {
    const double x = std::exp2(exponent(random));
    EXPECT_NEAR(fast_reciprocal(x) * x, 1, 0x1p-51) << x;
    EXPECT_NEAR(fast_rsqrt(x) * std::sqrt(x), 1, 0x1p-51) << x;
  }
  // Values far from any float32, as variances of float64 data may be.
  for (const double x : {0.0, 1e-300, 1e-40, 1e40, 1e300, HUGE_VAL}) {
    EXPECT_EQ(fast_rsqrt(x), 1 / std::sqrt(x));
  }
  EXPECT_TRUE(std::isnan(fast_rsqrt(std::nan(""))));
}

inline __global__ void merge_kernel(const double* records, int64_t ranks, int64_t channels,
                                    Merged* out) {
  const int lanes = lanes_per_channel(ranks);
  const int64_t channel = threadIdx.x / lanes;
  const bool present = channel < channels;
  const Merged all = merge_records(records, ranks, channels, present ? channel : -1, lanes);
  if (present) {
    out[channel * lanes + threadIdx.x % lanes] = all;
  }
}

TEST(BatchNormDevice, MergeRecords_AnyNumberOfRanks_IsTheSameInEachLane) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform(-1, 1);
  for (const int64_t ranks : {1, 2, 3, 7, 8, 31, 33, 100}) {
    int lanes = 1;
    while (lanes < ranks && lanes < 32) lanes *= 2;
    const int64_t channels = 3;
    std::vector<double> records;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const bool empty = rank % 4 == 2;
      for (int64_t c = 0; c < channels; ++c) records.push_back(empty ? 0 : uniform(random));
      for (int64_t c = 0; c < channels; ++c) records.push_back(empty ? 0 : 1 + uniform(random));
      records.push_back(empty ? 0 : 5.0 + static_cast<double>(rank));
    }
    std::vector<Merged> out(channels * lanes);
    ASSERT_EQ(launch(1, 128, merge_kernel, records.data(), ranks, channels, out.data()),
              cudaSuccess);
    for (int64_t c = 0; c < channels; ++c) {
      const Welford<double> want = merge_ranks(records.data(), ranks, channels, c);
      for (int lane = 0; lane < lanes; ++lane) {
        const Merged& got = out[c * lanes + lane];
        EXPECT_EQ(got.count, want.count);
        EXPECT_NEAR(got.mean, want.mean, 1e-14) << ranks << " ranks";
        EXPECT_NEAR(got.m2 / want.m2, 1, 1e-13) << ranks << " ranks";
      }
    }
  }
}

}  // namespace
}  // namespace apex::kernels
