// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel::detail {

// Note [Weighted means]
//
// Ranks with different amounts of data compute the mean over the global batch as follows. Each rank
// sums its losses, gradients are summed over the ranks, and the sum is divided by the total number
// of samples, the sum of the ranks' weights. The step report contains the weight of each rank, and
// is read before the first bucket is unpacked, so no further collective is needed. Every rank adds
// the same weights in the same order, so all ranks divide by the same number.
//
// A sum in 16 bits may overflow although its terms do not. So the terms are first multiplied by a
// power of two of at most 1 / (number of ranks). The total weight of the last step would not be a
// better factor, because it may differ by orders of magnitude, as in the last batch of an epoch.

/// The weight of the samples whose gradients a rank has accumulated since the last synchronized
/// backward. Not thread safe.
class BatchWeight {
 public:
  /// Sets the weight of the samples in the following backwards, until leave(). `weight` has one
  /// element on any device. On the CPU it is read immediately, on other devices by value(). Does
  /// not block.
  /// @throws Error if leave() was not called after the last enter().
  void enter(const at::Tensor& weight);
  void leave() noexcept;

  /// A backward has reached parameters. Several backwards of the same samples count once. Returns
  /// whether this one counts. If it fails without synchronization, the caller restores an earlier
  /// copy of this object.
  bool backward_began();
  /// Whether a backward that begins now would not count.
  bool has_counted() const { return entered_.defined() ? counted_ : missing_; }
  /// The total weight. NaN if a backward had samples without a weight. A negative or non-finite
  /// weight makes the total invalid, whatever the other weights are. May wait for a device.
  double value() const;
  /// Whether there were backwards since the last reset().
  bool accumulates() const { return missing_ || !weights_.empty(); }
  /// Call it when the gradients were reduced or dropped.
  void reset();

 private:
  at::Tensor entered_;    ///< the current weight; undefined after leave()
  bool counted_ = false;  ///< since the last reset()
  bool missing_ = false;
  std::vector<at::Tensor> weights_;  ///< of the backwards that count, in float64, on any device
};

}  // namespace apex::parallel::detail
