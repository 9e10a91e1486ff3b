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
// first bucket is unpacked, which multiplies anyway: no collective and no pass over memory more.
// Every rank adds the same numbers in the same order, so all divide by the same.
//
// Sums of 16 bits overflow where the mean would not. So they are made of gradients that were
// multiplied by a power of two, about one by the last total, which every rank knows; that is exact,
// but for numbers which the mean could not hold either. See Note [Averages in low precision].

/// The weight of the samples whose gradients a rank has accumulated since the last synchronized
/// backward. Not thread safe.
class BatchWeight {
 public:
  /// The backwards that follow are of samples with this weight, until leave(). `weight` has one
  /// element, on any device; on the CPU it is read at once, else by value(). Does not block.
  /// @throws Error if the last one was not left.
  void enter(const at::Tensor& weight);
  void leave() noexcept;

  /// A backward has reached parameters. Several backwards of the same samples count once.
  void backward_began();
  /// NaN if a backward was of samples without a weight. May wait for a device.
  double value() const;
  /// The gradients are reduced, or dropped.
  void reset();

 private:
  std::optional<double> number_;  ///< of the samples that were entered, or
  at::Tensor tensor_;             ///< on a device
  bool entered_ = false;
  bool counted_ = false;  ///< since the last reset()
  bool missing_ = false;
  double sum_ = 0;
  std::vector<at::Tensor> on_device_;  ///< to be added to it
};

}  // namespace apex::parallel::detail
