// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel::detail {

// Note [Weighted means]
//
// Ranks with different amounts of data compute the mean over the global batch as follows. Each rank
// sums its losses, gradients are summed over the ranks, and the sum is divided by the total number
// of samples, which is the sum of the ranks' weights. The step report contains the weight of each
// rank, and is read before the first bucket is unpacked. So this needs no further collective. The
// division takes place when gradients are copied out of the bucket, or in the bucket if they are
// not copied. Every rank adds the same weights in the same order, so all ranks divide by the same
// number.
//
// A sum in 16 bits may overflow although its terms do not. So the terms are first multiplied by a
// power of two of at most 1 / (number of ranks). The total weight of the last step would not be a
// better factor, because it may differ from this one by orders of magnitude, as in the last batch
// of an epoch.

/// The weight of the samples whose gradients a rank has accumulated since the last synchronized
/// backward. Not thread safe.
class BatchWeight {
 public:
  /// Sets the weight of the samples in the following backwards, until leave(). `weight` has one
  /// element on any device. On the CPU it is read immediately, on other devices by value(). Does
  /// not block.
  /// @throws Error if leave() was not called after the last enter().
  void enter(const at::Tensor& weight);
  void enter(double weight);
  void leave() noexcept;

  /// A backward has reached parameters. Several backwards of the same samples count once. Returns
  /// whether this one counts. If it fails without synchronization, the caller restores an earlier
  /// copy of this object.
  bool backward_began();
  /// The total weight. NaN if a backward had samples without a weight. A negative or non-finite
  /// weight makes the total invalid, whatever the other weights are. May wait for a device.
  double value() const;
  /// Whether there were backwards since the last reset().
  bool accumulates() const { return missing_ || !numbers_.empty() || !on_device_.empty(); }
  /// Call it when the gradients were reduced or dropped.
  void reset();

 private:
  std::optional<double> number_;  ///< the current weight, if it is known on the host
  at::Tensor tensor_;             ///< the current weight, if it is on a device
  bool entered_ = false;
  bool counted_ = false;  ///< since the last reset()
  bool missing_ = false;
  std::vector<double> numbers_;  ///< of the backwards that count
  std::vector<at::Tensor> on_device_;
};

}  // namespace apex::parallel::detail
