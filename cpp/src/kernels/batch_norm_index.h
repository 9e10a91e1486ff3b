// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <initializer_list>

/// Marks functions that the CUDA kernels share with the host and its unit tests.
#if defined(__CUDACC__)
#define APEX_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define APEX_HOST_DEVICE inline
#endif

/// Launch geometry of the CUDA kernels: how blocks and threads divide the elements. The host code
/// that plans and the device code that indexes are both here, without CUDA, so that host tests can
/// walk every block and thread. All element indices are 64-bit.

namespace apex::kernels {

/// Sizes of an input [N, C, S].
struct Planes {
  int64_t batch;
  int64_t channels;
  int64_t plane;
};

/// The limits that shape a launch: those of a device, or of one kernel on it.
struct DeviceLimits {
  int multiprocessors;
  int threads_per_multiprocessor;  // resident at the same time
};

constexpr int kLoadBytes = 16;     // the widest load of one thread
constexpr int kLoadsInFlight = 4;  // independent loads a thread issues before it uses the first
constexpr int kMaxSplits = 1024;
// Threads per block. Several blocks of this size are resident on a multiprocessor, so that some
// keep the memory busy while another starts or ends.
constexpr int kBlockThreads = 256;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Elements per load: 16 bytes, or 8 bytes, if every run of `run` elements is aligned to that.
/// Otherwise one element.
inline int vector_width(int64_t run, int element_bytes, bool pointers_aligned) {
  for (const int width : {kLoadBytes / element_bytes, kLoadBytes / element_bytes / 2}) {
    if (pointers_aligned && run % width == 0) {
      return width;
    }
  }
  return 1;
}

/// The number of blocks that share each of `shared` channels or tiles, at most `useful`, on a
/// device that runs `blocks` blocks at once. Rounded down, because excess blocks would run alone at
/// the end. If that leaves more than a third of the device idle, the launch fills the device twice.
inline int64_t count_splits(int64_t blocks, int64_t shared, int64_t useful) {
  const int64_t most = useful < kMaxSplits ? useful : kMaxSplits;
  int64_t splits = shared > 0 ? blocks / shared : 1;
  splits = splits < 1 ? 1 : splits;
  while (splits < most && 3 * shared * splits < 2 * blocks * ceil_div(shared * splits, blocks)) {
    ++splits;
  }
  return splits < most ? splits : (most < 1 ? 1 : most);
}

// ---- channels first: [N, C, S] -----------------------------------------------------------------

/// The plan of a channels-first launch. A channel is a sequence of units of `vector` elements,
/// plane after plane. `splits` blocks share it, and each takes a contiguous range. Block index =
/// channel * splits + split.
struct PlanesPlan {
  Planes sizes;
  int vector;
  int threads;
  int splits;
  int64_t units_per_plane;
  int64_t units;  // per channel
  int64_t units_per_split;
  int64_t blocks() const { return sizes.channels * splits; }
};

/// With few channels, several blocks per channel fill the device once. With many channels, each
/// gets one block, with no more threads than it has work for.
inline PlanesPlan plan_planes(Planes sizes, int element_bytes, bool pointers_aligned,
                              DeviceLimits limits) {
  PlanesPlan plan{sizes, 1, 32, 1, 0, 0, 0};
  plan.vector = vector_width(sizes.plane, element_bytes, pointers_aligned);
  plan.units_per_plane = sizes.plane / plan.vector;
  plan.units = plan.units_per_plane * sizes.batch;
  while (plan.threads < kBlockThreads && int64_t{plan.threads} * 2 * kLoadsInFlight <= plan.units) {
    plan.threads *= 2;
  }
  const int64_t resident = static_cast<int64_t>(limits.multiprocessors) *
                           (limits.threads_per_multiprocessor / plan.threads);
  const int64_t useful = plan.units / (static_cast<int64_t>(plan.threads) * kLoadsInFlight);
  const int64_t splits = count_splits(resident, sizes.channels, useful);
  plan.units_per_split = plan.units > 0 ? ceil_div(plan.units, splits) : 0;
  plan.splits = plan.units > 0 ? static_cast<int>(ceil_div(plan.units, plan.units_per_split)) : 1;
  return plan;
}

/// An upper bound of the number of blocks in a plan, for any kernel on a device of these limits.
inline int64_t most_planes_blocks(Planes sizes, int element_bytes, bool pointers_aligned,
                                  DeviceLimits limits) {
  const int threads = plan_planes(sizes, element_bytes, pointers_aligned, limits).threads;
  return sizes.channels + 2 * static_cast<int64_t>(limits.multiprocessors) *
                              (limits.threads_per_multiprocessor / threads);
}

/// Walks the units thread, thread + threads, ... of a split without a division per step.
struct PlaneCursor {
  int64_t unit;  // within the channel
  int64_t end;
  int64_t batch;
  int64_t within;  // unit within its plane

  APEX_HOST_DEVICE PlaneCursor(const PlanesPlan& plan, int64_t split, int thread)
      : unit(split * plan.units_per_split + thread),
        end((split + 1) * plan.units_per_split < plan.units ? (split + 1) * plan.units_per_split
                                                            : plan.units),
        batch(plan.units_per_plane > 0 ? unit / plan.units_per_plane : 0),
        within(plan.units_per_plane > 0 ? unit % plan.units_per_plane : 0),
        batch_step_(plan.units_per_plane > 0 ? plan.threads / plan.units_per_plane : 0),
        within_step_(plan.units_per_plane > 0 ? plan.threads % plan.units_per_plane : 0) {}

  APEX_HOST_DEVICE bool valid() const { return unit < end; }

  APEX_HOST_DEVICE int64_t offset(const PlanesPlan& plan, int64_t channel) const {
    return (batch * plan.sizes.channels + channel) * plan.sizes.plane + within * plan.vector;
  }

  APEX_HOST_DEVICE void advance(const PlanesPlan& plan) {
    unit += plan.threads;
    batch += batch_step_;
    within += within_step_;
    if (within >= plan.units_per_plane) {
      within -= plan.units_per_plane;
      ++batch;
    }
  }

 private:
  int64_t batch_step_;
  int64_t within_step_;
};

// ---- channels last: [R, C] ---------------------------------------------------------------------

/// The plan of a channels-last launch. A block owns `threads_x * vector` neighbouring channels (a
/// tile) and a contiguous range of rows. Block index = split * tiles + tile; thread index = y *
/// threads_x + x.
struct RowsPlan {
  int64_t rows;
  int64_t channels;
  int vector;
  int threads_x;
  int threads_y;
  int64_t tiles;
  int splits;
  int64_t rows_per_split;
  int64_t blocks() const { return tiles * splits; }
  APEX_HOST_DEVICE int threads() const { return threads_x * threads_y; }
  APEX_HOST_DEVICE int tile_channels() const { return threads_x * vector; }
  APEX_HOST_DEVICE int64_t begin(int64_t split) const { return split * rows_per_split; }
  APEX_HOST_DEVICE int64_t end(int64_t split) const {
    return begin(split + 1) < rows ? begin(split + 1) : rows;
  }
};

constexpr int kRowsThreads = 512;  // per block of a reduction
constexpr int kMaxTileChannels = 64;

/// A row of threads covers 128 bytes. Reductions get one large block per multiprocessor, because
/// the sums of all blocks are added afterwards. Elementwise passes get as many blocks as fit.
inline RowsPlan plan_rows(int64_t rows, int64_t channels, int element_bytes, bool pointers_aligned,
                          DeviceLimits limits, bool reduces) {
  const int threads = reduces ? kRowsThreads : kBlockThreads;
  RowsPlan plan{rows, channels, 1, 1, threads, 1, 1, rows};
  plan.vector = vector_width(channels, element_bytes, pointers_aligned);
  const int64_t columns = ceil_div(channels, plan.vector);
  const int most = plan.vector == 1 ? 32 : 128 / (plan.vector * element_bytes);
  while (plan.threads_x < most && plan.threads_x < columns) {
    plan.threads_x *= 2;
  }
  plan.threads_y = threads / plan.threads_x;
  plan.tiles = ceil_div(columns, plan.threads_x);
  const int64_t per_multiprocessor =
      reduces ? 1 : limits.threads_per_multiprocessor / kBlockThreads;
  const int64_t useful = rows / (static_cast<int64_t>(plan.threads_y) * kLoadsInFlight);
  const int64_t splits =
      count_splits(limits.multiprocessors * per_multiprocessor, plan.tiles, useful);
  plan.rows_per_split = rows > 0 ? ceil_div(rows, splits) : 0;
  plan.splits = rows > 0 ? static_cast<int>(ceil_div(rows, plan.rows_per_split)) : 1;
  return plan;
}

// ---- sums of blocks that share a channel -------------------------------------------------------

/// One warp per channel adds the sums of `splits` blocks.
struct MergePlan {
  int64_t channels;
  int splits;
  int64_t blocks() const { return ceil_div(channels, kBlockThreads / 32); }
};

}  // namespace apex::kernels
