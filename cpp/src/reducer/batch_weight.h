// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel::detail {

// Note [Weighted means]
//
// Ranks that hold different amounts of data compute the mean over the global batch if each sums its
// losses, gradients are summed over the ranks, and the sum is divided by the number of all samples:
// the sum of the ranks' weights. A row of the step report has each rank's, and is read before the
// first bucket is unpacked: no collective more. What is otherwise divided while it is copied into a
// bucket is multiplied while it is copied out, or there, if it is not. Every rank adds the same
// numbers in the same order, so all divide by the same.
//
// A sum in 16 bits may overflow where its terms do not, so these are multiplied by a power of two
// that is less than one by the number of ranks. The last total would be no better a guide: it may
// be larger by orders of magnitude than this one, as that of an epoch's last batch is.

/// The weight of the samples whose gradients a rank has accumulated since the last synchronized
/// backward. Not thread safe.
class BatchWeight {
 public:
  /// The backwards that follow are of samples with this weight, until leave(). `weight` has one
  /// element, on any device; on the CPU it is read at once, else by value(). Does not block.
  /// @throws Error if the last one was not left.
  void enter(const at::Tensor& weight);
  void enter(double weight);
  void leave() noexcept;

  /// A backward has reached parameters. Several backwards of the same samples count once.
  void backward_began();
  /// NaN if a backward was of samples without a weight; one that is negative or not finite is not
  /// hidden by others. May wait for a device.
  double value() const;
  /// Backwards since the last reset() count.
  bool accumulates() const { return missing_ || !numbers_.empty() || !on_device_.empty(); }
  /// The gradients are reduced, or dropped.
  void reset();

 private:
  std::optional<double> number_;  ///< of the samples that were entered, or
  at::Tensor tensor_;             ///< on a device
  bool entered_ = false;
  bool counted_ = false;  ///< since the last reset()
  bool missing_ = false;
  std::vector<double> numbers_;  ///< of the backwards that count
  std::vector<at::Tensor> on_device_;
};

}  // namespace apex::parallel::detail
