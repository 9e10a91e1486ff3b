// SPDX-License-Identifier: BSD-3-Clause
// Walks every block and thread of the CUDA kernels' plans on the host: each element is visited
// exactly once, for all sizes and alignments.

#include "kernels/batch_norm_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include "support/launch_shapes.h"

namespace apex::kernels {
namespace {

constexpr DeviceLimits kLarge{132, 2048};
constexpr DeviceLimits kSmall{2, 1024};

/// Expects that every load of `vector` elements was visited once.
void expect_once(const std::vector<uint8_t>& visits) {
  const auto wrong = std::find_if(visits.begin(), visits.end(), [](uint8_t n) { return n != 1; });
  ASSERT_EQ(wrong, visits.end()) << "load " << wrong - visits.begin() << " of " << visits.size()
                                 << " was visited " << int{*wrong} << " times";
}

void expect_planes_cover(Planes sizes, int element_bytes, bool aligned, DeviceLimits limits) {
  const PlanesPlan plan = plan_planes(sizes, element_bytes, aligned, limits);
  ASSERT_GE(plan.threads, 32);
  ASSERT_EQ(plan.threads % 32, 0);
  ASSERT_GE(plan.splits, 1);
  const int64_t elements = sizes.batch * sizes.channels * sizes.plane;
  ASSERT_EQ(elements % plan.vector, 0);
  std::vector<uint8_t> visits(elements / plan.vector);
  for (int64_t block = 0; block < plan.blocks(); ++block) {
    const int64_t channel = block / plan.splits;
    for (int thread = 0; thread < plan.threads; ++thread) {
      for (PlaneCursor cursor(plan, block % plan.splits, thread); cursor.valid();
           cursor.advance(plan)) {
        const int64_t at = cursor.offset(plan, channel);
        ASSERT_EQ(at % plan.vector, 0) << "an unaligned load";
        ASSERT_LE(at + plan.vector, elements);
        ASSERT_EQ(at / sizes.plane % sizes.channels, channel);
        ASSERT_EQ((at + plan.vector - 1) / sizes.plane % sizes.channels, channel);
        ++visits[at / plan.vector];
      }
    }
  }
  expect_once(visits);
}

TEST(BatchNormIndex, Planes_AnySizes_VisitEveryElementOnce) {
  for (const Planes sizes : {Planes{1, 1, 1}, Planes{3, 5, 49}, Planes{2, 3, 64},
                             Planes{7, 2, 1000}, Planes{1, 1, 40000}, Planes{300, 1, 8},
                             Planes{0, 4, 16}, Planes{4, 4, 0}, Planes{33, 130, 4}}) {
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

void expect_rows_cover(int64_t rows, int64_t channels, int element_bytes, bool aligned,
                       DeviceLimits limits, bool reduces) {
  const RowsPlan plan = plan_rows(rows, channels, element_bytes, aligned, limits, reduces);
  ASSERT_EQ(plan.threads(), reduces ? kRowsThreads : kBlockThreads);
  ASSERT_LE(plan.tile_channels(), kMaxTileChannels);
  // Required by merge_tile: powers of two, several threads per sum, whole warps per column.
  ASSERT_EQ(kRowsThreads % (2 * plan.tile_channels()), 0);
  ASSERT_EQ(32 % plan.threads_x, 0);
  ASSERT_EQ(channels % plan.vector, 0);
  const int64_t columns = channels / plan.vector;
  std::vector<uint8_t> visits(rows * columns);
  for (int64_t block = 0; block < plan.blocks(); ++block) {
    const int64_t tile = block % plan.tiles;
    const int64_t split = block / plan.tiles;
    for (int thread = 0; thread < plan.threads(); ++thread) {
      const int64_t column = tile * plan.threads_x + thread % plan.threads_x;
      if (column >= columns) {
        continue;
      }
      for (int64_t row = plan.begin(split) + thread / plan.threads_x; row < plan.end(split);
           row += plan.threads_y) {
        ++visits[row * columns + column];
      }
    }
  }
  expect_once(visits);
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

TEST(BatchNormIndex, LaunchShapes_UpToResNet50_VisitEveryElementOnce) {
  const auto shapes = testing::launch_shapes();
  EXPECT_GT(shapes.size(), 700u);
  for (const auto& [shape, input] : shapes) {
    if (!input.rows) {
      expect_planes_cover(input.sizes, input.element_bytes, input.aligned, input.limits);
    } else {
      for (const bool reduces : {true, false}) {
        expect_rows_cover(input.sizes.batch * input.sizes.plane, input.sizes.channels,
                          input.element_bytes, input.aligned, input.limits, reduces);
      }
    }
    if (HasFatalFailure()) {
      FAIL() << input.sizes.batch << " x " << input.sizes.channels << " x " << input.sizes.plane;
    }
  }
}

/// Images per rank in the next test; APEX_TEST_IMAGES=256 takes a minute.
int64_t images() {
  const char* given = std::getenv("APEX_TEST_IMAGES");
  return given == nullptr ? 4 : std::strtoll(given, nullptr, 10);
}

TEST(BatchNormIndex, ResNet50_AllLayers_VisitEveryElementOnce) {
  for (const auto& [channels, side] : testing::kResNet50) {
    for (const DeviceLimits limits : testing::kDevices) {
      for (const auto& [bytes, aligned] : {std::pair{2, true}, {4, true}, {4, false}}) {
        const Planes sizes{images(), channels, side * side};
        expect_planes_cover(sizes, bytes, aligned, limits);
        for (const bool reduces : {true, false}) {
          expect_rows_cover(sizes.batch * sizes.plane, channels, bytes, aligned, limits, reduces);
        }
        ASSERT_FALSE(HasFatalFailure()) << channels << " of " << side;
      }
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
