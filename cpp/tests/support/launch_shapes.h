// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>

#include "kernels/batch_norm_index.h"

/// All launch shapes of the batch-norm CUDA kernels, up to the inputs of ResNet-50. A shape is the
/// part of a plan that decides which code a thread runs. Each comes with the smallest input that
/// produces it.

namespace apex::testing {

/// The batch norms of ResNet-50 at 224 x 224 pixels: channels, height = width.
constexpr std::array<std::array<int64_t, 2>, 12> kResNet50{{{64, 112},
                                                            {64, 56},
                                                            {256, 56},
                                                            {128, 56},
                                                            {128, 28},
                                                            {512, 28},
                                                            {256, 28},
                                                            {256, 14},
                                                            {1024, 14},
                                                            {512, 14},
                                                            {512, 7},
                                                            {2048, 7}}};

/// Multiprocessors and threads of an H200, an A100, a T4, and the emulator.
constexpr std::array<kernels::DeviceLimits, 4> kDevices{
    {{132, 2048}, {108, 2048}, {40, 1024}, {2, 1024}}};

/// The input of a launch, which determines its plan.
struct LaunchInput {
  kernels::Planes sizes;
  bool rows;  // channels last
  int element_bytes;
  bool aligned;
  kernels::DeviceLimits limits;
  int64_t elements() const { return sizes.batch * sizes.channels * sizes.plane; }
};

/// How the threads of a block loop over `units`, one unit at a time: whether some threads have no
/// unit, some run the unrolled loop, and some run the remainder loop.
struct LoopShape {
  bool idle, unrolled, rest;
  LoopShape(int64_t units, int64_t threads)
      : idle(units < threads),
        unrolled(units > (kernels::kLoadsInFlight - 1) * threads),
        rest(units / threads % kernels::kLoadsInFlight != 0 ||
             kernels::ceil_div(units, threads) % kernels::kLoadsInFlight != 0) {}
};

using LaunchShape = std::array<int, 12>;

inline LaunchShape shape_of(const kernels::PlanesPlan& plan) {
  const int64_t last = plan.units - (plan.splits - 1) * plan.units_per_split;
  const LoopShape first_loop(plan.units_per_split, plan.threads), last_loop(last, plan.threads);
  // A thread's step stays within its plane, crosses into the next, or skips whole planes.
  const int step = plan.units_per_plane > plan.threads ? 0 : plan.units_per_plane == 0 ? 2 : 1;
  const int several = 2 * (plan.sizes.batch > 1) + (plan.sizes.channels > 1);
  return {0,
          plan.vector,
          plan.threads,
          plan.splits > 1,
          several,
          step,
          first_loop.idle,
          first_loop.unrolled,
          first_loop.rest,
          last_loop.idle,
          last_loop.unrolled,
          last_loop.rest};
}

inline LaunchShape shape_of(const kernels::RowsPlan& plan, bool reduces) {
  const int64_t last = plan.rows - (plan.splits - 1) * plan.rows_per_split;
  const LoopShape first_loop(plan.rows_per_split, plan.threads_y), last_loop(last, plan.threads_y);
  const bool whole_tiles = plan.channels % plan.tile_channels() == 0;
  return {1 + reduces,     plan.vector,    plan.threads_x,     plan.splits > 1,
          plan.tiles > 1,  whole_tiles,    first_loop.idle,    first_loop.unrolled,
          first_loop.rest, last_loop.idle, last_loop.unrolled, last_loop.rest};
}

/// Calls f(sizes) for [N, C], [N, C, L], [N, C, H, W] and [N, C, D, H, W], from 1 x 1 up, and for
/// the inputs of ResNet-50 with up to 256 images. A kernel sees the product of the dimensions after
/// the channels.
template <typename F>
void for_each_input(F&& f) {
  for (const int64_t batch : {1, 2, 3, 4, 5, 8, 9, 16, 31, 32, 64, 100, 128, 256, 1000, 4096}) {
    for (const auto& [channels, side] : kResNet50) {
      if (batch <= 256) f(kernels::Planes{batch, channels, side * side});
    }
    for (const int64_t channels : {1,  2,  3,  4,  5,  6,  7,  8,  9,  12,  16,  24,  31,  32,
                                   33, 40, 48, 63, 64, 65, 68, 72, 96, 100, 128, 130, 256, 1000}) {
      for (const int64_t plane :
           {1,   2,   3,   4,   5,   6,   7,    8,    9,    10,   12,   14,
            15,  16,  17,  25,  27,  28,  32,   33,   36,   49,   56,   64,
            81,  100, 112, 125, 128, 169, 196,  216,  224,  256,  343,  400,
            512, 576, 729, 784, 900, 999, 1000, 1024, 2048, 3136, 4096, 12544}) {
        if (batch * channels * plane <= 1 << 18) f(kernels::Planes{batch, channels, plane});
      }
    }
  }
}

/// The smallest input of each shape.
inline std::map<LaunchShape, LaunchInput> launch_shapes() {
  std::map<LaunchShape, LaunchInput> found;
  for_each_input([&](const kernels::Planes& sizes) {
    for (const kernels::DeviceLimits& limits : kDevices) {
      for (const int bytes : {2, 4, 8}) {
        for (const bool aligned : {true, false}) {
          const auto note = [&](const LaunchShape& shape, bool rows) {
            const LaunchInput input{sizes, rows, bytes, aligned, limits};
            const auto [place, is_new] = found.emplace(shape, input);
            if (!is_new && input.elements() < place->second.elements()) place->second = input;
          };
          note(shape_of(kernels::plan_planes(sizes, bytes, aligned, limits)), false);
          for (const bool reduces : {true, false}) {
            note(shape_of(kernels::plan_rows(sizes.batch * sizes.plane, sizes.channels, bytes,
                                             aligned, limits, reduces),
                          reduces),
                 true);
          }
        }
      }
    }
  });
  return found;
}

}  // namespace apex::testing
