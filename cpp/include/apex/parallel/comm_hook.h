// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

/// Communication hooks: what is sent for a gradient bucket, and how it is reduced.

namespace apex::parallel {

/// A bucket of gradients as passed to a communication hook.
struct GradientBucket {
  int64_t index = 0;     ///< position in the launch order, from 0
  bool is_last = false;  ///< the last bucket of this backward
  at::Tensor buffer;     ///< [numel], one dtype on one device: the gradients in sequence
  std::vector<at::Tensor> gradients;   ///< views of `buffer`, shaped like the parameters
  std::vector<at::Tensor> parameters;  ///< the parameters, in the order of `gradients`
};

/// Replaces the all-reduce of a bucket. The hook also does the averaging: the result of its future
/// becomes the gradient as is.
class APEX_API CommHook {
 public:
  CommHook() = default;
  CommHook(const CommHook&) = delete;
  CommHook& operator=(const CommHook&) = delete;
  virtual ~CommHook();

  /// Called once per bucket and backward, in launch order, on the thread and stream that produced
  /// the last gradient of the bucket. Must not block the host. The future yields a tensor (or a
  /// list of one tensor) of the size of `bucket.buffer`; its dtype may differ. If it throws, or its
  /// future has an error, backward() throws CommunicationError with rank, hook, bucket and cause,
  /// and the reducer cannot be used any more. Over Gloo it does so on every rank; over other
  /// backends the other ranks wait for their timeout.
  virtual c10::intrusive_ptr<c10::ivalue::Future> run(GradientBucket& bucket) = 0;

  /// Identifies the hook in error messages, and between ranks, which must all use the same one.
  /// Default: the type's name.
  virtual std::string name() const;

  /// False is a promise: run() issues one collective per bucket, immediately, and callbacks of its
  /// future issue none. Buckets are then launched as soon as they are complete. Otherwise a CPU
  /// bucket is launched only after the previous one is done, so that collectives issued from
  /// callbacks have the same order on every rank.
  virtual bool may_chain() const { return true; }
};

/// All-reduces in `dtype` (float16 or bfloat16), after dividing by the world size. Sends half the
/// bytes of float32; every partial sum is rounded to `dtype`. Gradients that already have a 16-bit
/// dtype are sent unchanged. Costs two passes over a bucket and a buffer of its size in `dtype`.
/// The hook may be used on any thread, for one reducer.
/// @throws InvalidArgument for another dtype.
APEX_API std::shared_ptr<CommHook> make_compress_hook(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                      at::ScalarType dtype);

}  // namespace apex::parallel
