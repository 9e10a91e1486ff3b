// Walks every block and thread of the CUDA kernels' plans on the host: each element is visited
// exactly once, whatever the sizes and alignments.

#include "kernels/batch_norm_index.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace apex::kernels {
namespace {

constexpr DeviceLimits kLarge{132, 2048};
constexpr DeviceLimits kSmall{2, 1024};

void expect_planes_cover(Planes sizes, int element_bytes, bool aligned, DeviceLimits limits) {
  const PlanesPlan plan = plan_planes(sizes, element_bytes, aligned, limits);
  ASSERT_GE(plan.threads, 32);
  ASSERT_EQ(plan.threads % 32, 0);
  ASSERT_GE(plan.splits, 1);
  std::vector<int> visits(sizes.batch * sizes.channels * sizes.plane);
  for (int64_t block = 0; block < plan.blocks(); ++block) {
    const int64_t channel = block / plan.splits;
    for (int thread = 0; thread < plan.threads; ++thread) {
      for (PlaneCursor cursor(plan, block % plan.splits, thread); cursor.valid();
           cursor.advance(plan)) {
        const int64_t at = cursor.offset(plan, channel);
        ASSERT_EQ(at % plan.vector, 0) << "an unaligned load";
        for (int i = 0; i < plan.vector; ++i) {
          ASSERT_LT(at + i, static_cast<int64_t>(visits.size()));
          ASSERT_EQ((at + i) / sizes.plane % sizes.channels, channel);
          ++visits[at + i];
        }
      }
    }
  }
  for (size_t i = 0; i < visits.size(); ++i) {
    ASSERT_EQ(visits[i], 1) << "element " << i;
  }
}

TEST(BatchNormIndex, Planes_AnySizes_VisitEveryElementOnce) {
  for (const Planes sizes : {Planes{1, 1, 1}, Planes{3, 5, 49}, Planes{2, 3, 64}, Planes{7, 2, 1000},
                             Planes{1, 1, 40000}, Planes{300, 1, 8}, Planes{0, 4, 16},
                             Planes{4, 4, 0}, Planes{33, 130, 4}}) {
    for (const int bytes : {2, 4, 8}) {
      for (const bool aligned : {true, false}) {
        expect_planes_cover(sizes, bytes, aligned, kLarge);
        expect_planes_cover(sizes, bytes, aligned, kSmall);
      }
    }
  }
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

// The inputs of ResNet-50's batch norms with 32 and 256 images: channels, height = width.
constexpr int64_t kResNet50[][2] = {{64, 112}, {64, 56},   {256, 56}, {128, 28}, {512, 28},
                                    {256, 14}, {1024, 14}, {512, 7},  {2048, 7}};

TEST(BatchNormIndex, Planes_LargeBatches_FillTheDevice) {
  // Registers let half of a multiprocessor's threads in, or a quarter. With that many blocks at once, no round of
  // them may leave more than a third of the device idle.
  for (const auto& [channels, side] : kResNet50) {
    for (const int64_t batch : {32, 256}) {
      for (const int64_t share : {2, 4}) {
        const PlanesPlan plan = plan_planes({batch, channels, side * side}, 2, true, kLarge);
        if (batch * channels * side * side < 25'000'000) {
          continue;  // too little work for that
        }
        const double rounds = static_cast<double>(plan.blocks() * plan.threads) /
                              static_cast<double>(132 * 2048 / share);
        EXPECT_GE(rounds / std::ceil(rounds), 0.66) << channels << " of " << side << ", " << batch;
      }
    }
  }
  EXPECT_EQ(plan_planes({32, 2048, 49}, 2, true, kLarge).splits, 1);
}

void expect_rows_cover(int64_t rows, int64_t channels, int element_bytes, bool aligned,
                       DeviceLimits limits, bool reduces) {
  const RowsPlan plan = plan_rows(rows, channels, element_bytes, aligned, limits, reduces);
  ASSERT_EQ(plan.threads(), reduces ? kRowsThreads : kBlockThreads);
  ASSERT_LE(plan.tile_channels(), kMaxTileChannels);
  // What merge_tile relies on: powers of two, several threads per sum, whole warps per column.
  ASSERT_EQ(kRowsThreads % (2 * plan.tile_channels()), 0);
  ASSERT_EQ(32 % plan.threads_x, 0);
  std::vector<int> visits(rows * channels);
  for (int64_t block = 0; block < plan.blocks(); ++block) {
    const int64_t tile = block % plan.tiles;
    const int64_t split = block / plan.tiles;
    for (int thread = 0; thread < plan.threads(); ++thread) {
      const int64_t channel =
          tile * plan.tile_channels() + thread % plan.threads_x * plan.vector;
      if (channel >= channels) {
        continue;
      }
      for (int64_t row = plan.begin(split) + thread / plan.threads_x; row < plan.end(split);
           row += plan.threads_y) {
        for (int i = 0; i < plan.vector; ++i) {
          ASSERT_LT(channel + i, channels);
          ++visits[row * channels + channel + i];
        }
      }
    }
  }
  for (size_t i = 0; i < visits.size(); ++i) {
    ASSERT_EQ(visits[i], 1) << "element " << i;
  }
}

TEST(BatchNormIndex, Rows_AnySizes_VisitEveryElementOnce) {
  for (const int64_t channels : {1, 2, 3, 7, 8, 12, 33, 64, 68, 72, 130, 256}) {
    for (const int64_t rows : {0, 1, 5, 64, 1000}) {
      for (const int bytes : {2, 4, 8}) {
        for (const bool reduces : {true, false}) {
          expect_rows_cover(rows, channels, bytes, true, kLarge, reduces);
          expect_rows_cover(rows, channels, bytes, false, kSmall, reduces);
        }
      }
    }
  }
  expect_rows_cover(40000, 64, 2, true, kLarge, true);
}

TEST(BatchNormIndex, Rows_LargeBatches_FillTheDeviceOnce) {
  for (const auto& [channels, side] : kResNet50) {
    for (const int bytes : {2, 4}) {
      const int64_t rows = 256 * side * side;
      // One block that reduces per multiprocessor, four that map: never one more, and hardly less.
      const int64_t reducing = plan_rows(rows, channels, bytes, true, kLarge, true).blocks();
      EXPECT_LE(reducing, 132) << channels << " of " << side;
      EXPECT_GE(reducing, 128) << channels << " of " << side;
      const int64_t mapping = plan_rows(rows, channels, bytes, true, kLarge, false).blocks();
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
