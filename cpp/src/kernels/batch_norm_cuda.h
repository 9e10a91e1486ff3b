// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "batch_norm_index.h"
#include "batch_norm_math.h"

/// CUDA launches of batch norm on raw device pointers and a stream, without torch's tensors.
///
/// A direction is `launch_statistics`, [collective], `launch_normalize`, or `launch_reduce`,
/// [collective], `launch_gradient`. If several blocks share a channel, the first of the two is
/// followed by a launch that adds their sums. No function waits for the device. Launch errors are
/// returned as cudaError_t (0 is success). Thread safe for different streams and work areas.

namespace apex::kernels {

/// A contiguous array of one value per channel, in float32 or float64, or none. The type is a
/// run-time value, because elements are read and written only once per channel.
struct ChannelArray {
  float* narrow = nullptr;
  double* wide = nullptr;

  APEX_HOST_DEVICE double load(int64_t channel, double absent) const {
    if (wide != nullptr) return wide[channel];
    return narrow != nullptr ? static_cast<double>(narrow[channel]) : absent;
  }
  APEX_HOST_DEVICE void store(int64_t channel, double value) const {
    if (wide != nullptr) wide[channel] = value;
    if (narrow != nullptr) narrow[channel] = static_cast<float>(value);
  }
};

/// The arguments of all four launches. `rows` selects channels last, with batch * plane rows.
struct CudaCall {
  c10::ScalarType type;  // of elements: float32, float64, float16 or bfloat16
  bool rows;
  Planes sizes;
  bool aligned;  // every element pointer of the call is a multiple of 16 bytes
  DeviceLimits limits;
  void* stream;     // cudaStream_t
  double* partial;  // partial_length(call) values, uninitialized
};

int64_t partial_length(const CudaCall& call);

/// Writes mean[C], m2[C], count of this rank to `record` and adds one to *num_batches_tracked
/// (which may be null).
int launch_statistics(const CudaCall& call, const void* x, double* record,
                      int64_t* num_batches_tracked);

struct NormalizeArguments {
  const void* x;
  void* out;
  ChannelArray weight;
  ChannelArray bias;
  double eps;
  const double* records;  // of all ranks
  int64_t ranks;
  double momentum;             // kNoMomentum: cumulative average by num_batches
  const int64_t* num_batches;  // after this batch; may be null
  // Written:
  ChannelArray running_mean;
  ChannelArray running_var;
  double* mean;
  double* invstd;
  int64_t* count;
};

int launch_normalize(const CudaCall& call, const NormalizeArguments& arguments);

struct GradientArguments {
  const void* dy;
  const void* x;
  void* out;
  ChannelArray weight;
  const double* mean;
  const double* invstd;
  const int64_t* count;  // of values over all ranks
  double* sums;          // sum_dy[C], sum_dy_xmu[C]: written by reduce, read by gradient
  ChannelArray dweight;  // written by reduce
  ChannelArray dbias;
};

int launch_reduce(const CudaCall& call, const GradientArguments& arguments);
int launch_gradient(const CudaCall& call, const GradientArguments& arguments);

}  // namespace apex::kernels
