// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/export.h>

/// What happens to a bucket on the wire.

namespace apex::parallel {

/// A bucket of gradients as a communication hook sees it.
struct GradientBucket {
  int64_t index = 0;     ///< position in the launch order, from 0
  bool is_last = false;  ///< the last bucket of this backward
  at::Tensor buffer;     ///< [numel], one dtype on one device: the gradients, one after another
  std::vector<at::Tensor> gradients;   ///< views of `buffer`, shaped like the parameters
  std::vector<at::Tensor> parameters;  ///< the parameters, in the order of `gradients`
};

/// Replaces the all-reduce of a bucket. The hook owns the averaging, too: what its future yields is
/// taken as the final gradient.
class APEX_API CommHook {
 public:
  CommHook() = default;
  CommHook(const CommHook&) = delete;
  CommHook& operator=(const CommHook&) = delete;
  virtual ~CommHook();

  /// Called once per bucket and backward, in launch order, on the thread and the stream on which
  /// the last gradient of the bucket was produced. Must not block the host. The future yields a
  /// tensor (or a list of one tensor) of the size of `bucket.buffer`; its dtype may differ. What is
  /// thrown here reaches the caller of backward() nested in an apex::Error that names rank, hook
  /// and bucket; if it is not thrown on every rank, backward() throws CommunicationError on every
  /// rank (over Gloo; elsewhere the others wait for their timeout). So does an error in the future.
  virtual c10::intrusive_ptr<c10::ivalue::Future> run(GradientBucket& bucket) = 0;

  /// Tells hooks apart, in error messages and between ranks, which must all have the same. Default:
  /// the type.
  virtual std::string name() const;

  /// False promises that run() issues one collective per bucket, at once, and none from a callback
  /// of its future. Then buckets are launched as soon as they are complete. Otherwise a bucket on
  /// the CPU is launched when the one before it is done, so that collectives issued from callbacks
  /// come in the same order on every rank.
  virtual bool may_chain() const { return true; }

  /// Whether the reduction of `bucket` takes a second collective, issued by finish().
  virtual bool has_finish(const GradientBucket&) const { return false; }

  /// Called at the end of backward for each bucket that has_finish(), in launch order, with what
  /// the future of run() yielded; returns the future of the result. The buckets after it are still
  /// on their way.
  virtual c10::intrusive_ptr<c10::ivalue::Future> finish(GradientBucket& bucket,
                                                         const at::Tensor& first);
};

/// An all-reduce in `wire` (float16 or bfloat16), divided by the world size before the sum: half
/// the bytes of float32, and sums rounded to `wire` at every step. Gradients that are narrow
/// already are sent as they are. Costs two passes over a bucket and a buffer of its size in `wire`.
/// @throws InvalidArgument for another dtype. The hook may be used on any thread, for one reducer.
APEX_API std::shared_ptr<CommHook> make_compress_hook(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                      at::ScalarType wire);

/// Like make_compress_hook(), but sums in float32: an all-to-all hands each rank its share of every
/// other rank's gradients in `wire`, the rank sums its share in float32 (a reduce-scatter), and an
/// all-gather distributes the averages in `wire`. Each gradient is rounded twice, whatever the
/// world size, and every rank gets the same bits. The bytes on the wire are those of an all-reduce
/// in `wire`; the sums cost a buffer of the bucket's size in `wire`, and 1/world_size of it in
/// float32.
APEX_API std::shared_ptr<CommHook> make_fp32_accumulate_hook(
    c10::intrusive_ptr<c10d::ProcessGroup> group, at::ScalarType wire);

}  // namespace apex::parallel
