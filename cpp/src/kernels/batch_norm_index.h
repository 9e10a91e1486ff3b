#pragma once

#include <cstdint>

#include "batch_norm_cpu.h"
#include "host_device.h"

/// How the CUDA kernels divide the elements among blocks and threads. Host code plans, device code
/// follows; both are here, free of CUDA, so that the host's tests can walk every block and thread.
/// All element indices are 64-bit.

namespace apex::kernels {

/// What a launch is shaped by; read from the device's properties.
struct DeviceLimits {
  int multiprocessors;
  int threads_per_multiprocessor;
};

constexpr int kLoadBytes = 16;     // the widest load of one thread
constexpr int kLoadsInFlight = 4;  // independent loads a thread issues before it uses the first
constexpr int kMaxSplits = 1024;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Elements per load: a full 16 bytes where every run of `run` elements starts aligned, else one.
inline int vector_width(int64_t run, int element_bytes, bool pointers_aligned) {
  const int width = kLoadBytes / element_bytes;
  return pointers_aligned && run % width == 0 ? width : 1;
}

// ---- channels first: [N, C, S] -----------------------------------------------------------------

/// A channel is a sequence of units of `vector` elements, plane after plane; `splits` blocks share
/// it, each a contiguous range. Block index = channel * splits + split.
struct PlanesPlan {
  Planes sizes;
  int vector;
  int threads;
  int splits;
  int64_t units_per_plane;
  int64_t units;            // per channel
  int64_t units_per_split;
  int64_t blocks() const { return sizes.channels * splits; }
};

/// Large batches fill the device twice over with several blocks per channel; small ones get one
/// block per channel that is no larger than there is work for.
inline PlanesPlan plan_planes(Planes sizes, int element_bytes, bool pointers_aligned,
                              DeviceLimits limits) {
  PlanesPlan plan{sizes, 1, 32, 1, 0, 0, 0};
  plan.vector = vector_width(sizes.plane, element_bytes, pointers_aligned);
  plan.units_per_plane = sizes.plane / plan.vector;
  plan.units = plan.units_per_plane * sizes.batch;
  while (plan.threads < 512 && plan.threads * 2 * kLoadsInFlight <= plan.units) {
    plan.threads *= 2;
  }
  const int64_t resident = static_cast<int64_t>(limits.multiprocessors) *
                           (limits.threads_per_multiprocessor / plan.threads);
  const int64_t wanted = sizes.channels > 0 ? ceil_div(2 * resident, sizes.channels) : 1;
  const int64_t useful = plan.units / (static_cast<int64_t>(plan.threads) * kLoadsInFlight);
  int64_t splits = wanted < useful ? wanted : useful;
  splits = splits < 1 ? 1 : (splits > kMaxSplits ? kMaxSplits : splits);
  plan.units_per_split = plan.units > 0 ? ceil_div(plan.units, splits) : 0;
  plan.splits = plan.units > 0 ? static_cast<int>(ceil_div(plan.units, plan.units_per_split)) : 1;
  return plan;
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

/// A block owns `threads_x * vector` neighbouring channels (a tile) and a contiguous range of rows.
/// Block index = split * tiles + tile; thread index = y * threads_x + x.
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

constexpr int kRowsThreads = 512;
constexpr int kMaxTileChannels = 64;

/// A row of threads covers 128 bytes. Reductions get one large block per multiprocessor, because
/// the last block of a tile reads what all others left; passes that only map get as many as fit,
/// twice over.
inline RowsPlan plan_rows(int64_t rows, int64_t channels, int element_bytes, bool pointers_aligned,
                          DeviceLimits limits, bool reduces) {
  RowsPlan plan{rows, channels, 1, 1, kRowsThreads, 1, 1, rows};
  plan.vector = vector_width(channels, element_bytes, pointers_aligned);
  const int64_t columns = ceil_div(channels, plan.vector);
  const int most = plan.vector == 1 ? 32 : 8;
  while (plan.threads_x < most && plan.threads_x < columns) {
    plan.threads_x *= 2;
  }
  plan.threads_y = kRowsThreads / plan.threads_x;
  plan.tiles = ceil_div(columns, plan.threads_x);
  const int64_t per_multiprocessor =
      reduces ? 1 : 2 * (limits.threads_per_multiprocessor / kRowsThreads);
  const int64_t wanted =
      plan.tiles > 0 ? ceil_div(limits.multiprocessors * per_multiprocessor, plan.tiles) : 1;
  const int64_t useful = rows / (static_cast<int64_t>(plan.threads_y) * kLoadsInFlight);
  int64_t splits = wanted < useful ? wanted : useful;
  splits = splits < 1 ? 1 : (splits > kMaxSplits ? kMaxSplits : splits);
  plan.rows_per_split = rows > 0 ? ceil_div(rows, splits) : 0;
  plan.splits = rows > 0 ? static_cast<int>(ceil_div(rows, plan.rows_per_split)) : 1;
  return plan;
}

}  // namespace apex::kernels
