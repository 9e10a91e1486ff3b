// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Digests of tensors that should be equal on all ranks, and what they tell. Knows no
/// communication.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <apex/parallel/model_sync.h>

namespace apex::parallel {

/// Of its memory; 0: it does not count, as one without memory, a sparse one, or one on meta.
int64_t bytes_of_state(const at::Tensor& tensor);

/// Of part `index` of `parts` of the memory of `tensors`, cut without regard to where one ends. Not
/// 0. A bit more or less changes it, and on the CPU so do words that have changed places. Waits
/// for a device.
int64_t digest_of_part(const std::vector<NamedTensor>& tensors, int64_t index, int64_t parts);

/// The digest of each tensor.
std::vector<int64_t> digests_of(const std::vector<NamedTensor>& tensors);

/// Who differs from whom.
struct Divergence {
  std::vector<size_t> tensors;  ///< those that differ, in order
  std::vector<int> apart;       ///< ranks that are not like the most; by majority or not
  bool majority = false;        ///< more than half of the ranks are alike
  int like = 0;                 ///< the first of the most ranks that are alike
};
/// @param digests  [ranks * tensors], by rank.
/// @param counts   by tensor: whether it is looked at.
Divergence find_divergence(const std::vector<int64_t>& digests, size_t ranks,
                           const std::vector<bool>& counts);

}  // namespace apex::parallel
