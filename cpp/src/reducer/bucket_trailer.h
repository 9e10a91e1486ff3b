// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What rides behind the gradients of a message: numbers that are summed with them.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace apex::parallel::detail {

/// One number per reported parameter, 1 where a rank has a gradient for it (the used-parameter
/// mask), then one per fact, 1 where the fact holds on a rank; else 0. The sum over ranks is above
/// 0 exactly if it is 1 on some rank, in every floating dtype, for every number of ranks, and also
/// if the numbers were averaged.
class BucketTrailer {
 public:
  BucketTrailer() = default;
  /// @param reported  indices of parameters.
  /// @param facts     at most 32.
  BucketTrailer(std::vector<int64_t> reported, int facts)
      : reported_(std::move(reported)), facts_(facts) {}

  int64_t numel() const { return static_cast<int64_t>(reported_.size()) + facts_; }
  const std::vector<int64_t>& reported() const { return reported_; }
  bool carries_facts() const { return facts_ > 0; }

  /// Writes this rank's numbers into `trailer` [numel()], of any floating dtype, on any device.
  /// @param used   by parameter index; empty: none is.
  /// @param facts  bit i: fact i holds.
  void write(const at::Tensor& trailer, const std::vector<uint8_t>& used, uint32_t facts) const;

  // Note [Trailers on a device]
  //
  // Each number that is written by itself is a kernel launch, and each that is read by itself a
  // wait of the host. So on devices other than the CPU usual() is copied by the multi-tensor copy
  // that packs the gradients, what differs from it is zeroed by one multi-tensor call, together
  // with the members that have no gradient, and the masks of all messages are read in one copy.

  /// The numbers [numel()] of a rank that uses all reported parameters, and for which no fact
  /// holds.
  at::Tensor usual(const at::TensorOptions& options) const;
  /// Appends the elements of `trailer` that are zero where usual() is 1.
  void append_unused(const at::Tensor& trailer, const std::vector<uint8_t>& used,
                     std::vector<at::Tensor>& zeros) const;
  /// Writes the facts that hold where usual() was copied.
  void write_facts(const at::Tensor& trailer, uint32_t facts) const;

  /// Of sums: adds to `used_by_any` (by parameter index) which parameters are used on some rank.
  /// `trailers[i]` belongs to `sums[i]`. Blocks the host until they can be read, and returns how
  /// often: once for each tensor on the CPU, and once for all others.
  static int64_t read_used(const std::vector<const BucketTrailer*>& trailers,
                           const std::vector<at::Tensor>& sums, std::vector<uint8_t>& used_by_any);

  /// Of a sum: bit i is set if fact i holds on some rank. Blocks likewise.
  uint32_t read_facts(const at::Tensor& trailer) const;

 private:
  int64_t mask_numel() const { return static_cast<int64_t>(reported_.size()); }

  std::vector<int64_t> reported_;
  int facts_ = 0;
};

}  // namespace apex::parallel::detail
