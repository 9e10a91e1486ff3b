// SPDX-License-Identifier: BSD-3-Clause
// Plans of the CUDA kernels' launches. emulated/batch_norm_cuda_test.cpp runs them.

#include "kernels/batch_norm_index.h"
#include "kernels/batch_norm_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/launch_shapes.h"

namespace apex::kernels {
namespace {

constexpr DeviceLimits kLarge{132, 2048};

// dx at x = mean, which is no float32, has no term of the slope.
TEST(BatchNormMath, GradientAtTheMean_IsThatOfTheExactMean) {
  const double mean = 1000.00001;
  const auto found = gradient_coefficients<float>(mean, 2.0, 1.0, 0.3, 70.0, 0.01);
  EXPECT_NEAR(found.dy_mean - (mean - double{found.high}) * found.slope, 0.3 * 0.01, 1e-9);
}

TEST(BatchNormIndex, Planes_Alignment_DecidesVectorWidth) {
  EXPECT_EQ(plan_planes({2, 3, 64}, 2, true, kLarge).vector, 8);
  EXPECT_EQ(plan_planes({2, 3, 64}, 4, true, kLarge).vector, 4);
  EXPECT_EQ(plan_planes({2, 3, 64}, 2, false, kLarge).vector, 1);
  EXPECT_EQ(plan_planes({2, 3, 49}, 2, true, kLarge).vector, 1);
  // 14 * 14: half of a load.
  EXPECT_EQ(plan_planes({2, 3, 196}, 2, true, kLarge).vector, 4);
  EXPECT_EQ(plan_planes({2, 3, 6}, 4, true, kLarge).vector, 2);
  EXPECT_EQ(plan_planes({2, 3, 7}, 8, true, kLarge).vector, 1);
}

TEST(BatchNormIndex, Planes_MoreThanTwoToThe31Elements_OffsetsStayRight) {
  const Planes sizes{3, 1 << 20, 1 << 10};  // 3 * 2^30 elements
  const PlanesPlan plan = plan_planes(sizes, 2, true, kLarge);
  const int64_t channel = sizes.channels - 1;
  int64_t last = -1;
  for (int thread = 0; thread < plan.threads; ++thread) {
    for (PlaneCursor cursor(plan, plan.splits - 1, thread); cursor.valid(); cursor.advance(plan)) {
      last = std::max(last, cursor.offset(plan, channel) + plan.vector - 1);
    }
  }
  EXPECT_EQ(last, 3 * (int64_t{1} << 30) - 1);
}

TEST(BatchNormIndex, Planes_LargeBatches_FillTheDevice) {
  // Registers limit a multiprocessor to two to eight blocks. With that many resident blocks, no
  // wave may leave more than a third of the device idle.
  for (const auto& [channels, side] : testing::kResNet50) {
    for (const int64_t batch : {32, 256}) {
      for (const int resident : {2, 3, 4, 5, 6, 7, 8}) {
        const Planes sizes{batch, channels, side * side};
        const PlanesPlan plan = plan_planes(sizes, 2, true, {132, resident * kBlockThreads});
        EXPECT_LE(plan.blocks(), most_planes_blocks(sizes, 2, true, kLarge));
        if (batch * channels * side * side < 25'000'000) {
          continue;  // too little work to fill the device
        }
        const double rounds =
            static_cast<double>(plan.blocks() * plan.threads) / (132.0 * resident * kBlockThreads);
        EXPECT_GE(rounds / std::ceil(rounds), 0.66)
            << channels << " of " << side << ", " << batch << ", " << resident;
      }
    }
  }
  EXPECT_EQ(plan_planes({32, 2048, 49}, 2, true, kLarge).splits, 1);
}

TEST(BatchNormIndex, Rows_LargeBatches_FillTheDeviceOnce) {
  for (const auto& [channels, side] : testing::kResNet50) {
    for (const int bytes : {2, 4}) {
      const int64_t rows = 256 * side * side;
      // Per multiprocessor one reducing block or four mapping blocks: never more, and hardly fewer.
      const int64_t reducing = plan_rows(rows, channels, bytes, true, kLarge, true).blocks();
      EXPECT_LE(reducing, 132) << channels << " of " << side;
      EXPECT_GE(reducing, 128) << channels << " of " << side;
      const DeviceLimits four{132, 4 * kBlockThreads};
      const int64_t mapping = plan_rows(rows, channels, bytes, true, four, false).blocks();
      EXPECT_LE(mapping, 4 * 132) << channels << " of " << side;
      EXPECT_GE(mapping, 4 * 128) << channels << " of " << side;
    }
  }
}

TEST(BatchNormIndex, Rows_EmptyBatch_StillHasOneBlockPerTile) {
  const RowsPlan plan = plan_rows(0, 256, 2, true, kLarge, true);
  EXPECT_EQ(plan.splits, 1);
  EXPECT_EQ(plan.blocks(), plan.tiles);
}

}  // namespace
}  // namespace apex::kernels
